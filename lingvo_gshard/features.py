"""Lists the modules of the package's features. Each module takes part at one seam.

A seam imports its features when it is first used; see core/seams.py. A feature that this table does
not list takes part once its module is imported.
"""

# Modules of each seam. Features are called in this order.
MODULES: dict[str, tuple[str, ...]] = {
    "fused_attention": ("lingvo_gshard.kernels.layers.fused_attention",),
    "kernel_bodies": ("lingvo_gshard.kernels.splicing",),
    "long_losses": ("lingvo_gshard.long_inputs.chunked_loss",),
    "lowering_passes": ("lingvo_gshard.spmd_passes.passes",),
    "program_readers": ("lingvo_gshard.planning.program_reader",),
    "step_parts": (
        "lingvo_gshard.optimizers.averages",
        "lingvo_gshard.optimizers.spikes",
        "lingvo_gshard.optimizers.local_updates",
        "lingvo_gshard.optimizers.update_ratios",
        "lingvo_gshard.optimizers.offload",
        "lingvo_gshard.low_precision.fp8",
    ),
    "observers": ("lingvo_gshard.services.observers",),
    "checkpoint_storages": ("lingvo_gshard.object_stores.checkpoints",),
    "experiments": (
        "lingvo_gshard.params.language_model",
        "lingvo_gshard.params.translation",
        "lingvo_gshard.giants.gshard_paper",
        "lingvo_gshard.giants.hundred_languages",
        "lingvo_gshard.giants.one_gpu_language_models",
        "lingvo_gshard.giants.prepared_translation",
        "lingvo_gshard.giants.published_language_models",
        "lingvo_gshard.giants.study",
    ),
    "input_stages": (
        "lingvo_gshard.preparation.cleaning.cleaner",
        "lingvo_gshard.preparation.cleaning.leaks",
        "lingvo_gshard.preparation.vocabularies.vocabulary_trainer",
    ),
    "leaks": ("lingvo_gshard.preparation.cleaning.leaks",),
    "object_stores": ("lingvo_gshard.object_stores",),
    "orbax_stores": ("lingvo_gshard.object_stores.checkpoints",),
    "run_directories": ("lingvo_gshard.object_stores.run_directory",),
    "useful_flops": ("lingvo_gshard.facts.step",),
    "vocabularies": ("lingvo_gshard.preparation.vocabularies.json_vocabulary",),
    "products": (
        "lingvo_gshard.inference.stored_weights",
        "lingvo_gshard.low_precision.delayed_scales",
        "lingvo_gshard.fine_tuning.adapters",
    ),
    "codecs": ("lingvo_gshard.low_precision.codecs",),
    "precisions": ("lingvo_gshard.low_precision.fp8",),
    "tasks": ("lingvo_gshard.fine_tuning.lora",),
    "language_models": ("lingvo_gshard.fine_tuning.preferences",),
}
