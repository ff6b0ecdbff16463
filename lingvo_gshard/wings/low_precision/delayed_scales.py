"""Delayed scales: factors of products in FP8 are divided by what earlier steps have measured.

A scale of the same step needs the largest magnitude of a tensor before the first number of it can
be rounded: a reduction, on a mesh with a collective, ahead of every product. A delayed scale is
known before the step, so that XLA rounds a tensor where it computes it. NVIDIA's Transformer Engine
calls this delayed scaling
(https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html).

Each weight has a history: the largest magnitudes of the activations that it is multiplied with, of
itself, and of the gradients of the products, in the last STEPS steps. The largest of them makes the
scale. A history travels with its weight, through loops too. Its gradient is what a step measures.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core import Layer, NestedMap, VariableSpec, context, custom_gradient, tf
from lingvo_gshard.layers import PRODUCT_RULES, Multiply, Product, ProductContext, ProductRule
from lingvo_gshard.wings.low_precision.rounding import DelayedScales, largest_magnitude

LOCAL_LETTERS = {
    "f": "activations, weight and gradients of a product",
    "h": "steps, the last first",
}

# More steps clip less often after a large magnitude, and lose range for longer.
STEPS = 16
_SUFFIX = "_history"
# Magnitudes before the first step, with room to spare: normalized activations and initial weights
# are smaller. A gradient of 1 leaves e5m2 exact to 1e-9.
_INITIAL = (32.0, 1.0, 1.0)


def beside(layer: Layer) -> dict[str, VariableSpec]:
    """Declares a history beside each weight of a layer's products."""
    return {
        f"{name}{_SUFFIX}": VariableSpec(
            f"{spec.path}{_SUFFIX}",
            "fh",
            (len(_INITIAL), STEPS),
            "float32",
            _initial,
            update_rule=updated,
            is_measured=True,
        )
        for name, spec in layer.variables.items()
        if spec.inputs
    }


def updated(history_fh: tf.Tensor, measured_fh: tf.Tensor) -> tf.Tensor:
    """Returns a history after a step, or a stack of histories.

    What is not finite, or was not measured, leaves the history as it is.

    Args:
      history_fh: the history before the step.
      measured_fh: its gradient: the magnitudes of the step, and zeros after them.
    """
    moved = tf.concat([measured_fh[..., :1], history_fh[..., :-1]], -1)
    is_known = tf.math.is_finite(measured_fh[..., :1]) & (measured_fh[..., :1] > 0)
    return tf.where(is_known, moved, history_fh)


def _measured(y: tf.Tensor, history_fh: tf.Tensor, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns the product y of x and a weight. The gradient of its history is what it measures."""
    factors = [tf.stop_gradient(largest_magnitude(factor)) for factor in (x, weight)]

    @custom_gradient
    def compute(y: tf.Tensor, history_fh: tf.Tensor, of_x: tf.Tensor, of_weight: tf.Tensor):
        def gradient(dy: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
            column = tf.stack([of_x, of_weight, largest_magnitude(dy)])[:, tf.newaxis]
            return dy, tf.pad(column, [[0, 0], [0, history_fh.shape[1] - 1]]), None, None

        return tf.identity(y), gradient

    return compute(y, history_fh, *factors)


def _initial(shape: tuple[int, ...], dtype: tf.DType, key: tf.Tensor) -> tf.Tensor:
    del key
    return tf.broadcast_to(tf.constant(_INITIAL, dtype)[:, tf.newaxis], shape)


class _Histories(ProductRule):
    """Rounds the factors of products by the histories of their weights."""

    def multiply(
        self, product: Product, x: tf.Tensor, weight: Any, multiply: Multiply
    ) -> tf.Tensor:
        """Returns a product by the history of its first weight, which it measures for."""
        rounding = context.extension(ProductContext).rounding
        history_fh = product.theta.get(f"{product.names[0]}{_SUFFIX}") if product.names else None
        if history_fh is None or not isinstance(rounding, DelayedScales):
            return multiply(x, weight)
        largest = tf.reduce_max(tf.stop_gradient(history_fh), -1)
        known = dataclasses.replace(rounding, largest=largest)
        weight = tf.cast(weight, x.dtype)
        with context.override_extension(ProductContext, rounding=known):
            y = multiply(x, weight)
        return _measured(y, history_fh, x, weight)

    def obstacle(self, theta: NestedMap) -> str:
        """Returns "": kernels may compute the products, with scales of the same step."""
        del theta
        return ""


PRODUCT_RULES.register("delayed_scales")(_Histories())
