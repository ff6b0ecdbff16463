"""Experiments: functions that return Params. Importing this package registers all of them."""

from lingvo_gshard.giants import (
    gshard_paper,
    one_gpu_language_models,
    published_language_models,
    study,
)
from lingvo_gshard.params import language_model, translation

__all__ = [
    "gshard_paper",
    "language_model",
    "one_gpu_language_models",
    "published_language_models",
    "study",
    "translation",
]
