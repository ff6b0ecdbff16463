"""Names the modules of the package's features, by the seam at which they take part.

A seam imports its features when it is first used; see core/seams.py. A feature that is not named
here takes part once its module is imported.
"""

# Name of a seam -> modules, in the order in which their features are called.
MODULES: dict[str, tuple[str, ...]] = {
    "products": (
        "lingvo_gshard.low_precision.delayed_scales",
        "lingvo_gshard.fine_tuning.adapters",
    ),
    "codecs": ("lingvo_gshard.low_precision.codecs",),
    "precisions": ("lingvo_gshard.low_precision.fp8",),
    "tasks": ("lingvo_gshard.fine_tuning.lora",),
    "language_models": ("lingvo_gshard.fine_tuning.preferences",),
    "step": ("lingvo_gshard.low_precision.fp8",),
}
