"""Lists the modules of the package's features. Each module takes part at one seam.

A seam imports its features when it is first used; see core/seams.py. A feature that this table does
not list takes part once its module is imported.
"""

# Modules of each seam. Features are called in this order.
MODULES: dict[str, tuple[str, ...]] = {
    "fused_attention": ("lingvo_gshard.wings.kernels.layers.fused_attention",),
    "kernel_bodies": ("lingvo_gshard.wings.kernels.splicing",),
    "long_losses": ("lingvo_gshard.wings.long_inputs.chunked_loss",),
    "compiler_options": ("lingvo_gshard.wings.compiler_options.table",),
    "first_lowering_passes": ("lingvo_gshard.wings.spmd_passes.passes",),
    "lowering_passes": ("lingvo_gshard.wings.spmd_passes.passes",),
    "partitioners": ("lingvo_gshard.wings.spmd_passes.shardy",),
    "optimizers": ("lingvo_gshard.wings.optimizers.muon",),
    "program_files": ("lingvo_gshard.wings.saved_programs.saving",),
    "program_readers": ("lingvo_gshard.wings.planning.program_reader",),
    "step_parts": (
        "lingvo_gshard.wings.low_precision.loss_scale",
        "lingvo_gshard.wings.optimizers.micro_batches",
        "lingvo_gshard.wings.optimizers.averages",
        "lingvo_gshard.wings.optimizers.spikes",
        "lingvo_gshard.wings.optimizers.local_updates",
        "lingvo_gshard.wings.optimizers.update_ratios",
        "lingvo_gshard.wings.optimizers.offload",
        "lingvo_gshard.wings.optimizers.width_scaling",
        "lingvo_gshard.wings.low_precision.fp8",
        "lingvo_gshard.wings.low_precision.nvfp4_options",
    ),
    "service_options": ("lingvo_gshard.wings.services.run_options",),
    "observers": ("lingvo_gshard.wings.services.observers",),
    "checkpoint_storages": ("lingvo_gshard.wings.object_stores.checkpoints",),
    "save_barriers": ("lingvo_gshard.wings.cluster.save_barrier",),
    "evaluations": (
        "lingvo_gshard.wings.evaluation.text_scores",
        "lingvo_gshard.wings.evaluation.translation_scores",
    ),
    "experiments": (
        "lingvo_gshard.params.language_model",
        "lingvo_gshard.params.translation",
        "lingvo_gshard.wings.giants.experiments",
    ),
    "input_stages": (
        "lingvo_gshard.wings.preparation.cleaning.cleaner",
        "lingvo_gshard.wings.preparation.cleaning.leaks",
        "lingvo_gshard.wings.preparation.vocabularies.vocabulary_trainer",
    ),
    "report_notes": ("lingvo_gshard.wings.preparation.cleaning.report_notes",),
    "leaks": ("lingvo_gshard.wings.preparation.cleaning.leaks",),
    "object_stores": ("lingvo_gshard.wings.object_stores",),
    "orbax_stores": ("lingvo_gshard.wings.object_stores.checkpoints",),
    "run_locks": ("lingvo_gshard.wings.services.run_lock",),
    "run_directories": ("lingvo_gshard.wings.object_stores.run_directory",),
    "useful_flops": ("lingvo_gshard.wings.facts.step",),
    "vocabulary_kinds": ("lingvo_gshard.wings.preparation.vocabularies.json_vocabulary",),
    "product_rules": (
        "lingvo_gshard.wings.inference.stored_weights",
        "lingvo_gshard.wings.low_precision.delayed_scales",
        "lingvo_gshard.wings.fine_tuning.adapters",
    ),
    "renames": ("lingvo_gshard.wings.earlier_versions.renames",),
    "codecs": ("lingvo_gshard.wings.low_precision.codecs",),
    "precisions": (
        "lingvo_gshard.wings.low_precision.loss_scale",
        "lingvo_gshard.wings.low_precision.fp8",
        "lingvo_gshard.wings.low_precision.nvfp4_options",
    ),
    "task_features": (
        "lingvo_gshard.wings.fine_tuning.lora",
        "lingvo_gshard.wings.optimizers.width_scaling",
    ),
    "language_model_features": ("lingvo_gshard.wings.fine_tuning.preferences",),
}
