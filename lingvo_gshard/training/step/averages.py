"""Averages of the weights over steps, for evaluation and decoding.

The average of the weights over the last steps of a run is better than the weights of one step
(Polyak and Juditsky 1992, Acceleration of stochastic approximation by averaging). Here it is an
exponential moving average. After update t, counted from 0,

    average += (1 - d) (weight - average),   d = min(decay, (1 + t) / (10 + t))

Early in a run d is smaller, as in TensorFlow's tf.train.ExponentialMovingAverage with num_updates.
The average starts at the initial weights. It then covers about the last tenth of the steps so far,
and so forgets the initial weights quickly.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from lingvo_gshard.core.layer import VariableSpec, scope_name
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import OPTIMIZER_SCOPE

if TYPE_CHECKING:
    import jax

# The part of a trainer's state that holds the averages.
PART = "averages"


def specs(theta: NestedMap) -> NestedMap:
    """Returns the averages' tree of VariableSpec: the weights' specs with dtype float32."""
    return theta.transform(
        lambda spec: dataclasses.replace(
            spec, path=f"{spec.path}/average", dtype="float32", update_rule=None
        )
    )


def begin(theta: NestedMap) -> NestedMap:
    """Returns the initial averages: tensors if theta is, else copies of the arrays."""

    def first(weight: Any) -> tf.Tensor | np.ndarray | jax.Array:
        if tf.is_tensor(weight):
            return tf.cast(weight, tf.float32)
        return weight.copy().astype(np.float32)

    return theta.transform(first)


def update(
    specs: NestedMap,
    averages: NestedMap,
    theta: NestedMap,
    updates: tf.Tensor,
    decay: float,
    is_skipped: tf.Tensor | bool,
) -> NestedMap:
    """Returns the averages after a step.

    Args:
      specs: the weights' tree of VariableSpec.
      averages: float32, before the step.
      theta: the weights after the step.
      updates: an int32 scalar, the number of earlier updates of the weights.
      decay: the decay after many updates.
      is_skipped: a bool scalar; if true, the step must not change the averages.
    """
    t = tf.cast(updates, tf.float32)
    share = tf.maximum(1.0 - decay, 9.0 / (10.0 + t))

    def move(spec: VariableSpec, average: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        with tf.name_scope(f"{OPTIMIZER_SCOPE}/{scope_name(spec.path)}/"):
            moved = average + share * (tf.cast(weight, tf.float32) - average)
            return tf.where(is_skipped, average, moved)

    rows = zip(specs.flatten(), averages.flatten(), theta.flatten(), strict=True)
    return specs.pack(move(*row) for row in rows)


def to_weights(specs: NestedMap, averages: NestedMap) -> NestedMap:
    """Returns the averages in the dtypes of the weights."""
    pairs = zip(specs.flatten(), averages.flatten(), strict=True)
    return specs.pack(tf.cast(average, spec.dtype) for spec, average in pairs)
