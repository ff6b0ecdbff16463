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
import functools

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.layer import Layer, VariableSpec
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.rounding import DelayedScales, largest_magnitude

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


def add(model: Layer) -> None:
    """Declares a history for each weight of products of a model, unless it has one."""
    for layer in model.all_layers():
        for name, spec in layer.variables.items():
            if spec.inputs and f"{name}{_SUFFIX}" not in layer.histories:
                sizes = {"f": len(_INITIAL), "h": STEPS}
                layer.create_history(f"{name}{_SUFFIX}", "fh", sizes, _initial, updated)


def is_history(spec: VariableSpec) -> bool:
    """Returns whether a spec in a tree of weights declares a history."""
    return spec.update_rule is updated


def history_of(theta: NestedMap, name: str) -> tf.Tensor | None:
    """Returns the history of a weight of a layer; None in passes without."""
    return theta.get(f"{name}{_SUFFIX}")


def for_parts(layer: Layer, theta: NestedMap, count: int) -> list[NestedMap]:
    """Returns the weights of a layer for each of several parts of a batch that it computes.

    A weight's gradient is the sum over the parts, but what its history measures is the largest of
    what the parts measure.

    Args:
      layer: the layer.
      theta: its weights.
      count: number of parts.
    """
    if count == 1 or not context.current().has_histories:
        return [theta] * count
    pairs = zip(theta.flatten(), layer.variable_specs().flatten(), strict=True)
    copies = [_copies(x, count) if is_history(spec) else [x] * count for x, spec in pairs]
    return [theta.pack(leaves) for leaves in zip(*copies, strict=True)]


def _copies(history_fh: tf.Tensor, count: int) -> list[tf.Tensor]:
    @custom_gradient
    def compute(history_fh: tf.Tensor):
        copies = tuple(tf.identity(history_fh) for _ in range(count))
        return copies, lambda *measured: functools.reduce(tf.maximum, measured)

    return list(compute(history_fh))


def known(rounding: DelayedScales, history_fh: tf.Tensor) -> DelayedScales:
    """Returns a rounding by the scales of a history."""
    largest = tf.reduce_max(tf.stop_gradient(history_fh), -1)
    return dataclasses.replace(rounding, largest=largest)


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


def measured(y: tf.Tensor, history_fh: tf.Tensor, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns a product as it is; the gradient of its history is what the product measures.

    Args:
      y: the product.
      history_fh: the history of its weight.
      x: the activations.
      weight: the weight.
    """
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
