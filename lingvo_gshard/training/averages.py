"""Averages of the weights over the steps, to evaluate and decode with.

What the weights were in the last steps of a run, averaged, is nearer to where they were going than
any one of them (Polyak and Juditsky 1992, Acceleration of stochastic approximation by averaging).
Here older weights count exponentially less: after update t, counted from 0,

    average += (1 - d) (weight - average),   d = min(decay, (1 + t) / (10 + t))

d is smaller at first, as in TensorFlow's tf.train.ExponentialMovingAverage with num_updates: so the
average is over about the last tenth of the steps, and begins to forget the initial weights, which
it begins with, at once.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import tensorflow as tf

from lingvo_gshard.core.layer import VariableSpec, scope_name
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.optim.optimizer import SCOPE, Commit

# The part of a trainer's state.
PART = "averages"


def specs(theta: NestedMap) -> NestedMap:
    """Returns the VariableSpec tree of the weights' averages: float32, else as the weights."""
    return theta.transform(
        lambda spec: dataclasses.replace(
            spec, path=f"{spec.path}/average", dtype="float32", update_rule=None
        )
    )


def begin(theta: NestedMap) -> NestedMap:
    """Returns the averages before the first step: tensors if theta is, or copies of arrays."""

    def first(weight: tf.Tensor | np.ndarray | jax.Array) -> tf.Tensor | np.ndarray | jax.Array:
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
    commit: Commit,
) -> NestedMap:
    """Returns the averages after a step that left the weights at theta.

    specs: of the weights. updates: how often the weights were moved before, an int32 scalar.
    """
    t = tf.cast(updates, tf.float32)
    share = 1.0 - tf.minimum(decay, (1.0 + t) / (10.0 + t))

    def moved(spec: VariableSpec, average: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        with tf.name_scope(f"{SCOPE}/{scope_name(spec.path)}/"):
            return commit(average, average + share * (tf.cast(weight, tf.float32) - average))

    rows = zip(specs.flatten(), averages.flatten(), theta.flatten(), strict=True)
    return specs.pack(moved(*row) for row in rows)


def to_weights(specs: NestedMap, averages: NestedMap) -> NestedMap:
    """Returns averages in the types of the weights whose VariableSpecs are given."""
    pairs = zip(specs.flatten(), averages.flatten(), strict=True)
    return specs.pack(tf.cast(average, spec.dtype) for spec, average in pairs)
