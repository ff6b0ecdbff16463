"""The forward pass of a training step that watches the routers, as a pure function.

A separate program runs it on the batch of a step, before the step, with the same weights and random
numbers. The training step itself stays as it is. XLA leaves out what no router depends on: the
experts of the last layer, the softmax and the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.token_kinds import WatchedKinds
from lingvo_gshard.data.input import Batch
from lingvo_gshard.data.token_kinds import TokenKinds
from lingvo_gshard.layers import token_context
from lingvo_gshard.training.step.micro_batches import TensorBatch, sum_over_parts
from lingvo_gshard.training.step.trainer import Trainer

# Waits for `routing_sums` and returns them by name.
ReadSums: TypeAlias = "Callable[[], dict[str, np.ndarray]]"

# Name of the number of the step among the arrays of a watched batch.
_STEP = "watched_step"


def watched_batch(batch: Batch, kinds: TokenKinds | None, step: int) -> tuple[WatchedKinds, Batch]:
    """Returns the numbers of kinds, and all arrays that `routing_sums` reads.

    Args:
      batch: the batch of the step.
      kinds: the kinds of its tokens; None if they are unknown.
      step: number of the step, from 1.
    """
    arrays = kinds.arrays if kinds else {}
    sizes = kinds.sizes if kinds else WatchedKinds(0, 0)
    return sizes, {**batch, **arrays, _STEP: np.asarray(step, np.int32)}


def routing_sums(
    trainer: Trainer, theta: NestedMap, batch: TensorBatch, kinds: WatchedKinds
) -> dict[str, tf.Tensor]:
    """Returns what the watched routers report, summed over micro-batches.

    Args:
      trainer: defines the step.
      theta: the weights before the step.
      batch: the arrays that `watched_batch` returned.
      kinds: the numbers of kinds that it returned.

    Returns:
      `<path of the layer>/<name>` -> float32 tensor, with the names of `watched_sums`. Layers of a
      loop have one stacked tensor, under a name that `repetition.unstacked` expands.
    """
    features = dict(batch)
    step = features.pop(_STEP)
    key = tf.stack([tf.constant(trainer.p.seed & 0x7FFFFFFF, tf.int32), step])

    def compute(part: TensorBatch, key: tf.Tensor) -> dict[str, tf.Tensor]:
        with (
            context.use(context.Context(True, key)) as passing,
            token_context.override(watched=kinds),
        ):
            trainer.task.loss(theta, part)
        return passing.sums

    return sum_over_parts(compute, features, key, trainer.p.micro_batches)
