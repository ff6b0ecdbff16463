"""The global norm of a gradient, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap


def global_norm(gradients: NestedMap, counts: Sequence[bool]) -> tf.Tensor:
    """Returns the norm over all gradients together, a float32 scalar.

    Args:
      gradients: the gradients of the weights.
      counts: whether each of them counts; those of weights that the optimizer does not move do not.
    """
    pairs = zip(counts, gradients.flatten(), strict=True)
    return tf.sqrt(tf.add_n([_sum_of_squares(g) for counted, g in pairs if counted]))


def clipped(gradients: NestedMap, specs: NestedMap, norm: tf.Tensor, clip_norm: float) -> NestedMap:
    """Returns the gradients in float32, scaled to a norm of at most `clip_norm`.

    Source: Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, section 3.2.

    Args:
      gradients: the gradients of the weights.
      specs: the weights' tree of VariableSpec. What weights with an update rule get is not scaled.
      norm: their global norm.
      clip_norm: the largest norm; 0 disables clipping.
    """
    scale = clip_norm / tf.maximum(norm, clip_norm) if clip_norm else tf.constant(1.0)
    pairs = zip(specs.flatten(), gradients.flatten(), strict=True)
    return gradients.pack(
        tf.cast(g, tf.float32) * (1.0 if spec.update_rule else scale) for spec, g in pairs
    )


def _sum_of_squares(gradient: tf.Tensor) -> tf.Tensor:
    # Sums rows first, as means: XLA would merge two sums into one, which is slower on a CPU.
    squares = tf.square(tf.cast(gradient, tf.float32))
    if squares.shape.rank < 2:
        return tf.reduce_sum(squares)
    return tf.reduce_sum(tf.reduce_mean(squares, -1)) * cast(int, squares.shape[-1])
