"""Builds what an experiment's Params describe before any data is read: trainer, batches, mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from lingvo_gshard.core import Params, tf
from lingvo_gshard.data.input import Batch, Input, check_sizes
from lingvo_gshard.sharding import DEFAULT_STRATEGY, Mesh, Partitioning
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step.trainer import Trainer


def make_trainer(experiment: Params, task: Task | Params | None = None) -> Trainer:
    """Returns the experiment's trainer.

    Args:
      task: the experiment's task, or Params of it. None: the task with vocabularies of the sizes
        that the input asks for.
    """
    task = with_configured_vocabularies(experiment) if task is None else task
    if isinstance(task, Params) and "most_segments" in experiment.input:
        task = _with_most_segments(task, experiment.input.most_segments)
    return experiment.step.instantiate(task, experiment.run.steps)


def _with_most_segments(task: Params, most: int) -> Params:
    """Returns a task's Params whose attentions know the most segments of a row."""
    if most:
        task = task.copy()
        for _, node in task.nodes():
            if "most_segments" in node:
                node.set(most_segments=most)
    return task


def with_configured_vocabularies(experiment: Params) -> Params:
    """Returns the task's Params with the vocabulary sizes that the input's Params ask for."""
    task, input_ = experiment.task, experiment.input
    return task.cls.with_vocabulary_sizes(task, input_.cls.configured_vocabulary_sizes(input_))


def with_vocabulary_sizes(task: Params, input_: Input) -> Params:
    """Returns the task's Params with the input's size for each vocabulary of size 0."""
    return cast(type[Task], task.cls).with_vocabulary_sizes(task, input_.vocabulary_sizes())


def batch_specs(experiment: Params) -> dict[str, tf.TensorSpec]:
    """Returns the shape and dtype of each array of a training batch, sorted by name.

    Raises:
      UserError: an array is larger than any step can be compiled for.
    """
    specs = experiment.input.cls.batch_specs(experiment.input)
    check_sizes(specs)
    return {name: specs[name] for name in sorted(specs)}


def first_batch(input_: Input, seed: int) -> Batch:
    """Returns the first training batch, read by an iterator of its own."""
    batches = input_.train_batches(seed)
    try:
        return next(batches)
    finally:
        batches.close()


def requested_mesh(
    experiment: Params, mesh: str | None, device_order: str | None = None
) -> Mesh | None:
    """Returns the requested mesh, by default the experiment's; None if neither names one.

    Args:
      experiment: Params whose `sharding` has the defaults.
      mesh: axes and sizes, such as "data=4,model=2".
      device_order: "contiguous" or "topology".
    """
    text = experiment.sharding.mesh if mesh is None else mesh
    if mesh is None and not text:
        return None
    return Mesh.parse(text, device_order or experiment.sharding.device_order)


def one_axis(experiment: Params, devices: int, device_order: str | None = None) -> Mesh:
    """Returns the mesh data=N over all N devices, in the requested or the experiment's order."""
    order = device_order or experiment.sharding.device_order
    return Mesh((("data", devices),), order)


def requested_partitioning(experiment: Params, mesh: Mesh, strategy: str | None) -> Partitioning:
    """Returns the partitioning over a mesh, by default with the experiment's strategy."""
    default = experiment.sharding.strategy or DEFAULT_STRATEGY
    text: str = default if strategy is None else strategy
    return Partitioning.make(mesh, text, experiment.sharding.overrides)


def requested_partitioner(experiment: Params, partitioner: str | None) -> str:
    """Returns the requested partitioner, by default the experiment's."""
    return partitioner or experiment.sharding.partitioner


def requested_compile_options(experiment: Params, options: Sequence[str]) -> tuple[str, ...]:
    """Returns the requested changes to the compiler's options, by default the experiment's."""
    return tuple(options or experiment.sharding.compile_options)


def check_overrides(partitioning: Partitioning, trainer: Trainer) -> None:
    """Raises ValueError naming an override that matches no layer and no weight of the task."""
    weights = [spec.path for spec in trainer.theta_specs.flatten()]
    partitioning.check_overrides([*trainer.task.layer_paths(), *weights])
