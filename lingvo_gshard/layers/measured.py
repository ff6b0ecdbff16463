"""Arrays beside weights that training steps measure; see `context.Context.beside`."""

from __future__ import annotations

import functools

from lingvo_gshard.core import Layer, NestedMap, context, custom_gradient, tf


def for_parts(layer: Layer, theta: NestedMap, count: int) -> list[NestedMap]:
    """Returns the weights of a layer for each of several parts of a batch that it computes.

    A weight's gradient is the sum over the parts, but a measurement is the largest of the parts'.
    """
    if count == 1 or context.current().beside is None:
        return [theta] * count
    pairs = zip(theta.flatten(), layer.variable_specs().flatten(), strict=True)
    copies = [_copies(x, count) if spec.is_measured else [x] * count for x, spec in pairs]
    return [theta.pack(leaves) for leaves in zip(*copies, strict=True)]


def _copies(array: tf.Tensor, count: int) -> list[tf.Tensor]:
    @custom_gradient
    def compute(array: tf.Tensor):
        copies = tuple(tf.identity(array) for _ in range(count))
        return copies, lambda *measured: functools.reduce(tf.maximum, measured)

    return list(compute(array))
