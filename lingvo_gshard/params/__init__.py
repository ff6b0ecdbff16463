"""Experiments: functions that return Params. Importing this package registers all of them."""

from lingvo_gshard.params import (
    gshard_paper,
    language_model,
    one_gpu_language_models,
    published_language_models,
    study,
    translation,
)

__all__ = [
    "gshard_paper",
    "language_model",
    "one_gpu_language_models",
    "published_language_models",
    "study",
    "translation",
]
