"""Dropout whose random bits are one byte per element."""

import tensorflow as tf

from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.params import Params

_LEVELS = 256


class Dropout(Layer):
    """Zeroes elements at random in training and scales the rest; the identity in evaluation.

    The rate is rounded to a multiple of 1/256, and the scale is that of the rounded rate, so the
    expectation is exact. Srivastava et al. 2014, JMLR 15.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("rate", 0.0, "Share of elements that are zeroed, to the nearest 1/256.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self._dropped_levels = round(self.p.rate * _LEVELS)
        if self.p.rate and not 0 < self._dropped_levels < _LEVELS:
            raise ValueError(
                f"{path}.rate: {self.p.rate} is neither 0 nor, to the nearest 1/{_LEVELS}, "
                "between 0 and 1"
            )

    def fprop(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns x with elements dropped; any shape, its static shape must be known."""
        dropped_levels = self._dropped_levels
        if not context.current().training or dropped_levels == 0:
            return x
        random_bytes = _random_bytes(x.shape, self.random_seed("mask"))
        scale = tf.constant(_LEVELS / (_LEVELS - dropped_levels), x.dtype)
        kept = random_bytes >= tf.constant(dropped_levels, tf.uint8)
        return x * tf.where(kept, scale, tf.zeros([], x.dtype))


def _random_bytes(shape: tf.TensorShape, seed: tf.Tensor) -> tf.Tensor:
    """Uniform uint8 of `shape`, four to each random word."""
    *outer, last = shape.as_list()
    words = random_numbers.words([*outer, -(-last // 4)], seed)
    random_bytes = tf.reshape(tf.bitcast(words, tf.uint8), [*outer, -1])
    return random_bytes[..., :last]
