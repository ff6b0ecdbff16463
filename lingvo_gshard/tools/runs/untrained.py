"""An experiment's step before it has a corpus: its trainer and the shapes of its batches."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.tools.console import summary
from lingvo_gshard.tools.train import with_vocabulary_sizes
from lingvo_gshard.training.trainer import Trainer


def make_trainer(experiment: Params) -> Trainer:
    """Returns the trainer; the vocabularies are taken to be as large as they may become.

    The corpus is read only if the Params do not say how large that is.
    """
    return experiment.trainer.instantiate(with_largest_vocabularies(experiment))


def with_largest_vocabularies(experiment: Params) -> Params:
    """Returns the task's Params with the sizes that its vocabularies may have where they are 0."""
    task, input_ = experiment.task.copy(), experiment.input
    if "vocabulary" not in input_:
        return with_vocabulary_sizes(task, input_.instantiate())
    size = input_.vocabulary.size
    sizes = {
        "vocabulary_size": size,
        "source_vocabulary_size": size,
        "target_vocabulary_size": input_.vocabulary.target_size or size,
    }
    for name, largest in sizes.items():
        if name in task and not task.get(name):
            task.set_path(name, largest)
    return task


def batch_specs(experiment: Params) -> dict[str, tf.TensorSpec]:
    """Returns shape and type of every array of a training batch, by name."""
    if hasattr(experiment.input.cls, "batch_spec"):
        specs = experiment.input.cls.batch_spec(experiment.input)
        return {name: tf.TensorSpec(*specs[name]) for name in sorted(specs)}
    batch = summary.next_batch(experiment.input.instantiate(), experiment.trainer.seed)
    return {name: tf.TensorSpec(batch[name].shape, batch[name].dtype) for name in sorted(batch)}
