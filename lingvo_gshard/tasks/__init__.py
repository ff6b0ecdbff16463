"""Tasks: models with loss, metrics and decoding."""

from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.tasks.translation import TranslationTask

__all__ = ["LanguageModelTask", "Task", "TranslationTask"]
