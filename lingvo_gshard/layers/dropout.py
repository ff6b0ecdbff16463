"""Dropout with a mask that is a hash of each element's index."""

from __future__ import annotations

from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import token_context


class Dropout(Layer):
    """Zeroes random elements in training and scales the others by 1 / (1 - rate).

    In evaluation it is the identity. Srivastava et al. 2014, JMLR 15.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("rate", 0.0, "Fraction of the elements that are zeroed.", minimum=0, below=1)
        p.define(
            "whole_vectors",
            False,
            "Whether the elements of the last dimension are dropped together.",
        )
        return p

    @layer_method
    def fprop(self, theta: NestedMap, x: tf.Tensor, exempt: tf.Tensor | None = None) -> tf.Tensor:
        """Returns x with elements dropped. The shape of x must be static.

        Args:
          theta: no weights.
          x: the elements.
          exempt: bool, broadcastable to x: the elements that stay as they are.
        """
        if not context.current().training or self.p.rate == 0:
            return x
        shape = x.shape.as_list()
        if self.p.whole_vectors:
            shape[-1] = 1
        order = token_context.current().group_order
        by_group = (order.computed, order.dimension) if order else ()
        words = random_numbers.hashed_words(shape, self.random_seed("mask"), *by_group)
        kept = words >= tf.constant(round(self.p.rate * 2**32), tf.uint32)
        scale = tf.constant(1 / (1 - self.p.rate), x.dtype)
        # A product with a mask would make NaN of an infinite gradient of a dropped element.
        y = tf.where(kept, x * scale, tf.zeros_like(x))
        return y if exempt is None else tf.where(exempt, x, y)
