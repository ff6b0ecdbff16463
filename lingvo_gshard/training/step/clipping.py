"""Clips the gradients of a step to a global norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

from lingvo_gshard.core import NestedMap, VariableSpec, tf


def global_norm(gradients: NestedMap, counts: Sequence[bool]) -> tf.Tensor:
    """Returns the norm over all gradients together, a float32 scalar.

    Squares are summed in float32 and not scaled first, which would read all gradients twice. A norm
    above 1.8e19 is therefore infinite, so that the step counts as not finite. Gradients below 1e-19
    may count as 0; clipping scales large norms only.

    Args:
      counts: whether each gradient counts; False for weights that the optimizer does not move.
    """
    pairs = zip(counts, gradients.flatten(), strict=True)
    return tf.sqrt(tf.add_n([_sum_of_squares(g) for counted, g in pairs if counted]))


@dataclasses.dataclass(frozen=True)
class Clipping:
    """The gradients of a step, scaled to a norm of at most `clip_norm`.

    Source: Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, section 3.2.

    Attributes:
      specs: the weights' tree of VariableSpec. What weights with an update rule get is not scaled.
      norm: their global norm.
      clip_norm: the largest norm; 0 disables clipping.
    """

    gradients: NestedMap
    specs: NestedMap
    norm: tf.Tensor
    clip_norm: float

    def __call__(self) -> NestedMap:
        """Returns all gradients in float32, scaled."""
        scale = self.scale()
        pairs = zip(self.specs.flatten(), self.gradients.flatten(), strict=True)
        return self.gradients.pack(self.scaled(*pair, scale) for pair in pairs)

    def scale(self) -> tf.Tensor:
        """Returns the factor of the gradients, a float32 scalar."""
        if not self.clip_norm:
            return tf.constant(1.0)
        return self.clip_norm / tf.maximum(self.norm, self.clip_norm)

    def scaled(self, spec: VariableSpec, gradient: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """Returns the gradient of one weight, or of one layer of a stack, in float32 and scaled."""
        return tf.cast(gradient, tf.float32) * (1.0 if spec.update_rule else scale)


def _sum_of_squares(gradient: tf.Tensor) -> tf.Tensor:
    # Sums rows first, as means: XLA would merge two sums into one, which is slower on a CPU.
    squares = tf.square(tf.cast(gradient, tf.float32))
    if squares.shape.rank < 2:
        return tf.reduce_sum(squares)
    return tf.reduce_sum(tf.reduce_mean(squares, -1)) * cast(int, squares.shape[-1])
