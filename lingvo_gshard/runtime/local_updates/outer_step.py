"""The outer step of local updates as a program over the devices of all workers."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.runtime.local_updates.workers import stacked
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.runtime.program.step_programs import state_arrays
from lingvo_gshard.sharding.annotate import annotate_weights
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step.trainer import Trainer


def outer_step_program(
    trainer: Trainer, count: int, everywhere: Partitioning, partitioner: str
) -> Program:
    """Returns the program that makes the workers' weights equal.

    Inputs: the weights of all workers, the weights after the previous outer step, the outer
    optimizer's moments, whether each worker has stopped, and the step. Outputs: new values of the
    first three, whose memory is donated.

    Args:
      trainer: defines the outer step.
      count: number of workers.
      everywhere: the partitioning over the devices of all workers.
      partitioner: "gspmd" or "shardy".
    """
    rule, specs = trainer.local_updates, trainer.theta_specs
    arrays = _weight_arrays(trainer, everywhere)
    moment_arrays = outer_moment_arrays(trainer, everywhere)
    worker_arrays = [stacked(array, count) for array in arrays]
    stopped = stacked(Array("stopped", (), "bool", ()), count)
    outputs = [*worker_arrays, *arrays, *moment_arrays]

    def outer_step(*inputs: tf.Tensor) -> list:
        *tensors, stopped_W, step = inputs
        weights, rest = tensors[: len(arrays)], tensors[len(arrays) :]
        theta = annotate_weights(specs.pack(rest[: len(arrays)]), specs, "weights")
        moments = rule.moment_specs(specs).pack(rest[len(arrays) :])
        any_stopped = tf.reduce_any(stopped_W)
        means = specs.pack(tf.reduce_mean(tf.cast(x, tf.float32), 0) for x in weights)
        means = annotate_weights(means, specs, "weights")
        new_theta, new_moments = rule.update(specs, theta, means, moments, step, any_stopped)
        # A worker that has stopped keeps the weights that led to it, for the diagnosis.
        new_weights = [
            tf.where(any_stopped, old, tf.broadcast_to(new[None], old.shape))
            for old, new in zip(weights, new_theta.flatten(), strict=True)
        ]
        values = [*new_weights, *new_theta.flatten(), *new_moments.flatten()]
        return [(a.path, x, a.split) for a, x in zip(outputs, values, strict=True)]

    inputs = [*outputs, stopped, Array("step", (), "int32", ())]
    donated = range(len(outputs))
    return lower("outer_step", outer_step, inputs, everywhere, donated, partitioner)


def outer_moment_arrays(trainer: Trainer, everywhere: Partitioning) -> list[Array]:
    """Returns the arrays of the outer optimizer's moments, split as their weights are."""
    specs = trainer.local_updates.moment_specs(trainer.theta_specs)
    return [
        Array(f"outer.{path}", s.shape, s.dtype, everywhere.spec_storage_split(s, "moments"))
        for path, s in specs.flatten_items()
    ]


def _weight_arrays(trainer: Trainer, everywhere: Partitioning) -> list[Array]:
    arrays = state_arrays(trainer, everywhere)
    return [array for array in arrays if array.path.startswith("theta.")]
