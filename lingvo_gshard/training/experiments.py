"""Builds what an experiment's Params describe before any data is read: trainer, batches, mesh."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.trainer import Trainer

DEFAULT_STRATEGY = "expert"


def make_trainer(experiment: Params) -> Trainer:
    """Returns the experiment's trainer without reading its corpus where that is possible.

    Vocabularies of unknown size get the largest size that their Params allow.
    """
    return experiment.trainer.instantiate(with_largest_vocabularies(experiment))


def with_largest_vocabularies(experiment: Params) -> Params:
    """Returns the task's Params with the largest possible size for each vocabulary of size 0.

    The corpus is read only if the input's Params do not bound the size.
    """
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


def with_vocabulary_sizes(task: Params, input_: object) -> Params:
    """Returns the task's Params with the input's size for each vocabulary of size 0."""
    task = task.copy()
    for vocabulary in ("vocabulary", "source_vocabulary", "target_vocabulary"):
        name = f"{vocabulary}_size"
        if name in task and not task.get(name):
            task.set_path(name, getattr(input_, vocabulary).size)
    return task


def batch_specs(experiment: Params) -> dict[str, tf.TensorSpec]:
    """Returns the shape and dtype of each array of a training batch, by name."""
    if hasattr(experiment.input.cls, "batch_spec"):
        specs = experiment.input.cls.batch_spec(experiment.input)
        return {name: tf.TensorSpec(*specs[name]) for name in sorted(specs)}
    batch = first_batch(experiment.input.instantiate(), experiment.trainer.seed)
    return {name: tf.TensorSpec(batch[name].shape, batch[name].dtype) for name in sorted(batch)}


def first_batch(input_: object, seed: int) -> dict[str, np.ndarray]:
    """Returns the first training batch, read by an iterator of its own."""
    batches = input_.train_batches(seed)
    try:
        return next(batches)
    finally:
        batches.close()


def requested_mesh(
    experiment: Params, mesh: str | None, device_order: str = "contiguous"
) -> Mesh | None:
    """Returns the requested mesh, by default the experiment's; None if neither names one.

    Args:
      experiment: Params whose `sharding.mesh` is the default.
      mesh: axes and sizes, such as "data=4,model=2".
      device_order: "contiguous" or "topology".
    """
    text = experiment.sharding.mesh if mesh is None else mesh
    if mesh is None and not text:
        return None
    return Mesh.parse(text, device_order)


def requested_partitioning(experiment: Params, mesh: Mesh, strategy: str | None) -> Partitioning:
    """Returns the partitioning over a mesh, by default with the experiment's strategy."""
    strategy = strategy or experiment.sharding.strategy or DEFAULT_STRATEGY
    return Partitioning.make(mesh, strategy, experiment.sharding.overrides)


def check_overrides(partitioning: Partitioning, trainer: Trainer) -> None:
    """Raises ValueError naming an override that matches no layer and no weight of the task."""
    weights = [spec.path for spec in trainer.theta_specs.flatten()]
    partitioning.check_overrides([*trainer.task.layer_paths(), *weights])
