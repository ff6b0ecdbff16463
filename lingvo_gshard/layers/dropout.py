"""Dropout with a mask that is a hash of each element's index."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core import Layer, NestedMap, Params, context, layer_method, random_numbers, tf
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.token_context import GroupOrder


@dataclasses.dataclass(frozen=True)
class DropoutMask:
    """Decides which elements of an array are dropped, by a hash of each element's index.

    Code that computes an array block by block draws the mask of one block at a time.

    Attributes:
      rate: fraction of the elements that are dropped.
      key: int32 [2] key of the hash.
      order: storage order of token groups; None if they are stored by their numbers.
    """

    rate: float
    key: tf.Tensor
    order: GroupOrder | None = None

    @property
    def scale(self) -> float:
        """Factor of the elements that are kept."""
        return 1 / (1 - self.rate)

    def is_kept(self, shape: Sequence[int]) -> tf.Tensor:
        """Returns bool: whether each element of an array of this shape is kept."""
        return self._keeps(random_numbers.hashed_words(shape, self.key, *self._order()))

    def factors(self, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
        """Returns the factor of each element of an array: 0, or the scale."""
        return self._factors(self.is_kept(shape), dtype)

    def factors_at(self, index: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the factors of the elements with these indices, which are sums of terms.

        Args:
          index: uint32, sums of `index_terms`.
        """
        return self._factors(self._keeps(random_numbers.hashed(index, self.key)), dtype)

    def index_terms(self, shape: Sequence[int]) -> list[tf.Tensor]:
        """Returns the terms of the hashed indices, a uint32 vector for each dimension."""
        return random_numbers.index_terms(shape, *self._order())

    def _keeps(self, words: tf.Tensor) -> tf.Tensor:
        return words >= tf.constant(random_numbers.threshold(self.rate), tf.uint32)

    def _factors(self, kept: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.where(kept, tf.constant(self.scale, dtype), tf.constant(0, dtype))

    def _order(self) -> tuple:
        return (self.order.computed, self.order.dimension) if self.order else ()


class Dropout(Layer):
    """Zeroes random elements in training and scales the others by 1 / (1 - rate).

    In evaluation it is the identity. Srivastava et al. 2014, JMLR 15.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define_fraction("rate", 0.0, "Fraction of the elements that are zeroed.")
        p.define(
            "whole_vectors", False, "Whether elements of the last dimension are dropped together."
        )
        return p

    def mask(self) -> DropoutMask | None:
        """Returns the mask of the current pass; None if it drops nothing."""
        if not context.current().training or self.p.rate == 0:
            return None
        order = token_context.current().group_order
        return DropoutMask(self.p.rate, self.random_seed("mask"), order)

    @layer_method
    def fprop(self, theta: NestedMap, x: tf.Tensor, exempt: tf.Tensor | None = None) -> tf.Tensor:
        """Returns x with elements dropped. The shape of x must be static.

        Args:
          exempt: bool, broadcastable to x: the elements that stay as they are.
        """
        mask = self.mask()
        if mask is None:
            return x
        shape = x.shape.as_list()
        if self.p.whole_vectors:
            shape[-1] = 1
        scale = tf.constant(mask.scale, x.dtype)
        # A product with a mask would make NaN of an infinite gradient of a dropped element.
        y = tf.where(mask.is_kept(shape), x * scale, tf.zeros_like(x))
        return y if exempt is None else tf.where(exempt, x, y)
