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

from lingvo_gshard.core import OPTIMIZER_SCOPE, NestedMap, Params, VariableSpec, scope_name, tf
from lingvo_gshard.training import STEP_PARTS, Ingredients, StatePart, Update

if TYPE_CHECKING:
    import jax


@STEP_PARTS.register("averages")
class Averages(StatePart):
    """Keeps the averages of a trainer's weights."""

    name = "averages"
    titles = {name: "averages of weights"}
    split_as = "moments"
    is_evaluated = True

    @classmethod
    def define(cls, p: Params) -> None:
        p.define(
            "average_decay",
            0.0,
            "Decay of the averages of the weights; 0 keeps none.",
            minimum=0,
            below=1,
            changes_results=False,
        )

    @classmethod
    def of(cls, made: Ingredients) -> Averages | None:
        """Returns the averages of a trainer, if its Params ask for them."""
        decay = made.params.average_decay
        return cls(made.theta_specs, decay) if decay else None

    def __init__(self, theta: NestedMap, decay: float):
        """Takes the weights' tree of VariableSpec, and the decay after many updates."""
        self._theta, self._decay = theta, decay

    def specs(self) -> NestedMap:
        """Returns the averages' tree of VariableSpec: the weights' specs with dtype float32."""
        return self._theta.transform(
            lambda spec: dataclasses.replace(
                spec, path=f"{spec.path}/average", dtype="float32", update_rule=None
            )
        )

    def begin(self, theta: NestedMap) -> NestedMap:
        """Returns the initial averages: tensors if theta is, else copies of the arrays."""

        def first(weight: Any) -> tf.Tensor | np.ndarray | jax.Array:
            if tf.is_tensor(weight):
                return tf.cast(weight, tf.float32)
            return weight.copy().astype(np.float32)

        return theta.transform(first)

    def after(self, own: NestedMap, update: Update, theta: NestedMap) -> NestedMap:
        """Returns the averages after a step."""
        updates = tf.cast(update.updates, tf.float32)
        share = tf.maximum(1.0 - self._decay, 9.0 / (10.0 + updates))

        def move(spec: VariableSpec, average: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
            with tf.name_scope(f"{OPTIMIZER_SCOPE}/{scope_name(spec.path)}/"):
                moved = average + share * (tf.cast(weight, tf.float32) - average)
                return tf.where(update.is_skipped, average, moved)

        trees = (self._theta, own, theta)
        return own.pack(map(move, *(tree.flatten() for tree in trees)))

    def to_weights(self, own: NestedMap) -> NestedMap:
        """Returns the averages in the dtypes of the weights."""
        pairs = zip(self._theta.flatten(), own.flatten(), strict=True)
        return own.pack(tf.cast(average, spec.dtype) for spec, average in pairs)
