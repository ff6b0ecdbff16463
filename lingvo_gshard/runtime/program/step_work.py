"""What a training step does that is of use, as a saved program says it of itself."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from lingvo_gshard.core.layer import Layer
from lingvo_gshard.runtime.program.program import Work
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training import flops


def work_of_step(task: Layer, batch: Mapping[str, tf.TensorSpec]) -> Work | None:
    """Returns what a step on a batch of these shapes does; None for a task nobody counts."""
    if isinstance(task, TranslationTask):
        return _translation(task, batch)
    if isinstance(task, LanguageModelTask):
        return _language_model(task, batch)
    return None


def _translation(task: TranslationTask, batch: Mapping[str, tf.TensorSpec]) -> Work:
    rows, source = batch["source_ids"].shape
    target = batch["target_labels"].shape[1]
    sizes = {
        "source_ids": task.p.source_vocabulary_size,
        "target_inputs": task.p.target_vocabulary_size,
        "target_labels": task.p.target_vocabulary_size,
    }
    return Work(
        flops=flops.translation_step(task, rows, source, target),
        tokens=rows * (source + target),
        vocabularies=tuple((f"batch.{name}", size) for name, size in sizes.items()),
    )


def _language_model(task: LanguageModelTask, batch: Mapping[str, tf.TensorSpec]) -> Work:
    rows, length = batch["target_labels"].shape
    ids = ("target_inputs", "target_labels")
    return Work(
        flops=flops.language_model_step(task, rows, length),
        tokens=rows * length,
        vocabularies=tuple((f"batch.{name}", task.p.vocabulary_size) for name in ids),
    )
