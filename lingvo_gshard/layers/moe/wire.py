"""What rows are written as while they travel: fewer bytes, for an error that is known.

An element of a row comes back within half a unit in the last place of bfloat16 (2^-9 of itself), or
within max |x| / 254 over its row for int8, whose numbers are multiples of max |x| / 127.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_LARGEST = 127.0


class Format:
    """Rows as they are.

    dtype: what they are written in; None: their own.
    """

    dtype: tf.DType | None = None

    def write(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns what is sent of rows [G,E,C,M] or [E,G,C,M]; each with the first three."""
        return [x]

    def read(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """Returns the rows, in their type, of what `write` returned."""
        return tf.cast(sent[0], dtype)


class Bfloat16(Format):
    """Rounded to 8 significant bits."""

    dtype = tf.bfloat16

    def write(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns rows in bfloat16."""
        return [tf.cast(_rounded_to_bfloat16(tf.cast(x, tf.float32)), tf.bfloat16)]


class Int8(Format):
    """Symmetric integers, rounded to the nearest, ties to even, with a float32 scale for each row.

    A row of zeros stays one, and what is not finite makes its whole row NaN: no overflow is hidden.
    """

    dtype = tf.int8

    def write(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns rows in int8 and, of three dimensions, their scales."""
        x = tf.cast(x, tf.float32)
        scale = tf.reduce_max(tf.abs(x), axis=-1) / _LARGEST
        steps = tf.round(tf.math.divide_no_nan(x, scale[..., None]))
        return [tf.cast(tf.clip_by_value(steps, -_LARGEST, _LARGEST), tf.int8), scale]

    def read(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """Returns steps times scales, in the rows' type."""
        steps, scale = sent
        return tf.cast(tf.cast(steps, tf.float32) * scale[..., None], dtype)


FORMATS: dict[str, Format] = {"": Format(), "bfloat16": Bfloat16(), "int8": Int8()}


def _rounded_to_bfloat16(x: tf.Tensor) -> tf.Tensor:
    """float32 values that bfloat16 has, the nearest, ties to even.

    A cast there and back XLA may leave out, for more precision: done on one device and not on many.
    """
    bits = tf.bitcast(x, tf.uint32)
    constant = lambda value: tf.constant(value, tf.uint32)  # noqa: E731
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, constant(16)), constant(1))
    nearest = tf.bitwise.bitwise_and(bits + constant(0x7FFF) + odd, constant(0xFFFF0000))
    return tf.where(tf.math.is_nan(x), x, tf.bitcast(nearest, tf.float32))
