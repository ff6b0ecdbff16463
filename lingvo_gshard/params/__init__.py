"""Experiments: functions that return Params. Importing this package registers all of them."""

from lingvo_gshard.params import (
    gshard_paper,
    language_model,
    published_language_models,
    translation,
)

__all__ = ["gshard_paper", "language_model", "published_language_models", "translation"]
