"""The programs of training with workers: a worker's own step, and that in which they all meet."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.runtime.local_updates.workers import Workers
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.program import Array, Program
from lingvo_gshard.runtime.program.step_programs import (
    BatchSpecs,
    annotated,
    batch_arrays,
    described_metrics,
    state_arrays,
)
from lingvo_gshard.sharding.annotate import annotate_weights
from lingvo_gshard.training.monitoring.metric_vector import metric_vector
from lingvo_gshard.training.trainer import Trainer


def worker_program(
    trainer: Trainer, workers: Workers, partitioner: str, batch: BatchSpecs
) -> tuple[Program, list[str]]:
    """Returns a worker's training step, over its devices alone, and its metrics' names.

    Inputs and outputs are those of a training step, but that the state's arrays have a first
    dimension of 1: so they are the worker's parts of the arrays of all workers.
    """
    partitioning = workers.partitioning
    arrays = state_arrays(trainer, partitioning)
    own = [workers.own(array) for array in arrays]
    names: list[str] = []

    def train_step(*tensors: tf.Tensor) -> list:
        flat = (tf.squeeze(tensor, [0]) for tensor in tensors[: len(arrays)])
        state = annotated(trainer.state_specs().pack(flat), trainer)
        feed = dict(zip(sorted(batch), tensors[len(arrays) :], strict=True))
        new_state, metrics = trainer.train_step(state, feed)
        names[:], values = metric_vector(metrics.items())
        new_state = annotated(new_state, trainer)
        described = [
            (a.path, x[None], a.split) for a, x in zip(own, new_state.flatten(), strict=True)
        ]
        return [*described, described_metrics(values)]

    inputs = [*own, *batch_arrays(batch, partitioning)]
    donated = range(len(own))
    return lower("train_step", train_step, inputs, partitioning, donated, partitioner), names


def meeting_program(trainer: Trainer, workers: Workers, partitioner: str) -> Program:
    """Returns the step in which the workers' weights become one, over all devices.

    Inputs: the weights of all workers, the weights that they began with, the outer optimizer's
    moments, whether each worker has stopped, and the step. Outputs: the first three, as they are
    after it; their memory is taken over.
    """
    rule, specs = trainer.local_updates, trainer.theta_specs
    arrays = weight_arrays(trainer, workers)
    moments = moment_arrays(trainer, workers)
    theirs = [workers.all(array) for array in arrays]
    stopped = workers.all(Array("stopped", (), "bool", ()))
    inputs = [*theirs, *arrays, *moments, stopped, Array("step", (), "int32", ())]

    def meeting(*tensors: tf.Tensor) -> list:
        weights, rest = tensors[: len(arrays)], tensors[len(arrays) :]
        theta = annotate_weights(specs.pack(rest[: len(arrays)]), specs, "weights")
        held = rule.moment_specs(specs).pack(rest[len(arrays) : -2])
        any_stopped = tf.reduce_any(rest[-2])
        means = specs.pack(tf.reduce_mean(tf.cast(x, tf.float32), 0) for x in weights)
        new_theta, new_moments = rule.update(
            specs, theta, annotate_weights(means, specs, "weights"), held, rest[-1], any_stopped
        )
        moved = [
            tf.where(any_stopped, old, tf.broadcast_to(new[None], old.shape))
            for old, new in zip(weights, new_theta.flatten(), strict=True)
        ]
        values = [*moved, *new_theta.flatten(), *new_moments.flatten()]
        kept = [*theirs, *arrays, *moments]
        return [(a.path, x, a.split) for a, x in zip(kept, values, strict=True)]

    donated = range(len(inputs) - 2)
    return lower("meeting", meeting, inputs, workers.everywhere, donated, partitioner)


def weight_arrays(trainer: Trainer, workers: Workers) -> list[Array]:
    """Returns the arrays of the weights that all workers began with."""
    found = state_arrays(trainer, workers.everywhere)
    return [array for array in found if array.path.startswith("theta.")]


def moment_arrays(trainer: Trainer, workers: Workers) -> list[Array]:
    """Returns the arrays of the outer optimizer's moments, which lie as their weights do."""
    specs = trainer.local_updates.moment_specs(trainer.theta_specs)
    return [
        Array(
            f"outer.{path}", s.shape, s.dtype, workers.everywhere.spec_storage_split(s, "moments")
        )
        for path, s in specs.flatten_items()
    ]
