"""Codecs: compressed formats of the rows that the exchange sends between devices.

An element changes by at most half a unit in the last place of bfloat16 (2^-9 of itself). With int8
it changes by at most max|x| / 254 of its row, whose values are multiples of max|x| / 127.
"""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.lazy import tf

_LARGEST = 127.0


class Codec:
    """Sends rows without compression.

    Attributes:
      dtype: name of the type that is sent; None uses that of the rows.
    """

    dtype: str | None = None

    def encode(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors to send, each with the first three dimensions of x.

        Args:
          x: rows [G,E,C,M] or [E,G,C,M].
        """
        return [x]

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """Returns the rows, as `dtype`, from the tensors that `encode` returned."""
        return tf.cast(sent[0], dtype)


class Bfloat16(Codec):
    """Rounds to bfloat16, with 8 significant bits."""

    dtype = "bfloat16"

    def encode(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns the rows in bfloat16."""
        return [tf.cast(_round_to_bfloat16(tf.cast(x, tf.float32)), tf.bfloat16)]


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


# Codecs by the value of Exchange's `precision`.
CODECS: dict[str, Codec] = {"": Codec(), "bfloat16": Bfloat16(), "int8": Int8()}


def _round_to_bfloat16(x: tf.Tensor) -> tf.Tensor:
    """Returns float32 values rounded to the nearest bfloat16, ties to even.

    It works on the bits because XLA may remove a cast to bfloat16 and back on one device and not on
    many, which would change results.
    """
    bits = tf.bitcast(x, tf.uint32)
    constant = lambda value: tf.constant(value, tf.uint32)  # noqa: E731
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, constant(16)), constant(1))
    nearest = tf.bitwise.bitwise_and(bits + constant(0x7FFF) + odd, constant(0xFFFF0000))
    return tf.where(tf.math.is_nan(x), x, tf.bitcast(nearest, tf.float32))
