"""Codecs that send rows to experts in 8 bits.

With int8 an element changes by at most max|x| / 254 of its row, whose values are multiples of
max|x| / 127. fp8 is the recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3.3): rows and gradients
on their way to the experts are e4m3, with a scale for each 128 numbers. An element changes by at
most 1/16 of itself, or max|x| / 2^17 of the 128 numbers. Rows that come back are bfloat16, since
they are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core import known_sizes, tf
from lingvo_gshard.layers import CODECS, Bfloat16, Codec, round_mantissa
from lingvo_gshard.wings.low_precision.rounding import BLOCK, E4M3, scale_of

_LARGEST = 127.0


class Int8(Codec):
    """Quantizes each row symmetrically to int8, with a float32 scale for the row.

    Values are rounded to the nearest, ties to even. A row of zeros stays zero. A row with an
    infinity or a NaN becomes all NaN, so that no overflow is hidden.
    """

    dtype = "int8"

    def encode(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns the rows in int8 and their scales, which have three dimensions."""
        x = tf.cast(x, tf.float32)
        scale = tf.reduce_max(tf.abs(x), axis=-1) / _LARGEST
        steps = tf.round(tf.math.divide_no_nan(x, scale[..., None]))
        return [tf.cast(tf.clip_by_value(steps, -_LARGEST, _LARGEST), tf.int8), scale]

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """Returns the int8 values times the scales, as `dtype`."""
        steps, scale = sent
        return tf.cast(tf.cast(steps, tf.float32) * scale[..., None], dtype)


class Float8(Codec):
    """Rounds to e4m3 with a scale for each 128 numbers of a row.

    Scales are powers of two, so they are exact in bfloat16. 128 numbers with an infinity or a NaN
    among them become NaN, so that no overflow is hidden. The bits are sent as whole numbers, since
    compilers send e4m3 in a wider type for devices that have none.
    """

    dtype = "uint8"
    returning = Bfloat16()

    def encode(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns the bits of the rows, and the scales [G,E,C,blocks] or [E,G,C,blocks]."""
        *lead, size = known_sizes(x.shape)
        block = min(size, BLOCK)
        padded = tf.pad(tf.cast(x, tf.float32), [[0, 0]] * len(lead) + [[0, -size % block]])
        blocks = tf.reshape(padded, [*lead, -1, block])
        scale = scale_of(blocks, E4M3, [len(lead) + 1])
        bits = tf.reshape(_e4m3_bits(blocks / scale), padded.shape)[..., :size]
        return [bits, tf.cast(tf.squeeze(scale, -1), tf.bfloat16)]

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """Returns the values of the bits times the scales, as `dtype`."""
        bits, scale = sent
        size = known_sizes(bits.shape)[-1]
        scale = tf.repeat(tf.cast(scale, tf.float32), min(size, BLOCK), axis=-1)[..., :size]
        return tf.cast(_of_e4m3_bits(bits) * scale, dtype)


CODECS.register("fp8")(Float8())
CODECS.register("int8")(Int8())


# e4m3 without the sign: the bits of NaN; the bits of 2^-6, the smallest number of full precision;
# and the difference to float32, whose exponent is larger by 120.
_NAN, _NORMAL, _BIAS = 0x7F, 8, (127 - 7) << 3


def _e4m3_bits(x: tf.Tensor) -> tf.Tensor:
    """Returns the uint8 bits of float32 values of at most 448, rounded to the nearest e4m3.

    Ties go to even. XLA for CPUs casts to e4m3 by way of float16, which rounds some values twice.
    """
    constant = lambda value: tf.constant(value, tf.uint32)  # noqa: E731
    size = tf.abs(x)
    code = tf.bitwise.right_shift(tf.bitcast(round_mantissa(size, 3), tf.uint32), constant(20))
    is_small = size < 2.0**-6
    # Below 2^-6, neighbors are 2^-9 apart.
    small = tf.cast(tf.round(tf.where(is_small, size, 0.0) * 512.0), tf.uint32)
    code = tf.where(is_small, small, code - constant(_BIAS))
    code = tf.where(tf.math.is_nan(x), constant(_NAN), code)
    sign = tf.bitwise.right_shift(tf.bitcast(x, tf.uint32), constant(31))
    return tf.cast(tf.bitwise.bitwise_or(code, sign * constant(128)), tf.uint8)


def _of_e4m3_bits(bits: tf.Tensor) -> tf.Tensor:
    constant = lambda value: tf.constant(value, tf.uint32)  # noqa: E731
    word = tf.cast(bits, tf.uint32)
    code = tf.bitwise.bitwise_and(word, constant(_NAN))
    normal = tf.bitcast(tf.bitwise.left_shift(code + constant(_BIAS), constant(20)), tf.float32)
    size = tf.where(code < _NORMAL, tf.cast(code, tf.float32) / 512.0, normal)
    size = tf.where(tf.equal(code, constant(_NAN)), np.nan, size)
    return tf.where(word < 128, size, -size)
