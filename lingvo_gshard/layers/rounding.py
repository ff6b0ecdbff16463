"""Rounds the factors of products to 8-bit floating point in training.

A factor is divided by a scale, rounded to a type of 8 bits, and multiplied by the scale again. Sums
are in float32. A scale is the smallest power of two with which the largest magnitude still fits
into the type. Multiplying by a power of two is exact, so that the rounded factor is exact in
bfloat16, too: a device without products in 8 bits computes the same sums as one with them.

XLA for GPUs recognizes a product of such factors and calls cuBLASLt in FP8 if each factor has one
scale. Micikevicius et al. 2022, arXiv 2209.05433, define the types:

  e4m3  4 bits of exponent and 3 of mantissa, up to 448
  e5m2  5 bits of exponent and 2 of mantissa, up to 57344

A tensor of zeros stays zero. A tensor, or block, with an infinity or a NaN becomes all NaN, so that
no overflow is hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.sharding.einsum import RoundedFactor, Rounding

# Size of a block of DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
_BLOCK = 128
# The smallest scale: float32 has no smaller number of full precision.
_SMALLEST = 2.0**-126
# float32 numbers: the bits of the exponent, and the largest mantissa.
_EXPONENT, _MANTISSA = 0x7F800000, 0x007FFFFF


@dataclasses.dataclass(frozen=True)
class Format:
    """A type of 8 bits.

    Attributes:
      dtype: TensorFlow's name of it.
      largest: its largest finite number.
    """

    dtype: str
    largest: float


E4M3 = Format("float8_e4m3fn", 448.0)
E5M2 = Format("float8_e5m2", 57344.0)


@dataclasses.dataclass(frozen=True)
class TensorScales:
    """One scale for each tensor, from its largest magnitude in the same step.

    Attributes:
      forward: type of activations and weights.
      backward: type of gradients.
    """

    forward: Format = E4M3
    backward: Format = E5M2

    def activation(self, x: tf.Tensor, layout: str) -> RoundedFactor:
        """Returns the rounded activations; see `einsum.Rounding`."""
        return self._of_any_product(x, layout, self.forward)

    def weight(self, x: tf.Tensor, layout: str, summed: str) -> RoundedFactor:
        """Returns the rounded weight; see `einsum.Rounding`."""
        del summed
        return self._of_any_product(x, layout, self.forward)

    def gradient(self, x: tf.Tensor, layout: str) -> RoundedFactor:
        """Returns the rounded gradient; see `einsum.Rounding`."""
        return self._of_any_product(x, layout, self.backward)

    def _of_any_product(self, x: tf.Tensor, layout: str, number_format: Format) -> RoundedFactor:
        """Returns the rounded tensor for every product: its scale is the same in all of them."""
        rounded = _rounded(x, number_format, range(len(layout)))
        return lambda summed: rounded


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """A scale for each block of numbers, as in DeepSeek-V3, arXiv 2412.19437, section 3.3.

    Blocks of activations and gradients are up to 128 numbers along the last dimension that a
    product sums over. Blocks of weights are up to 128 x 128 numbers, along the last dimension that
    the forward pass sums over and the last one of the others. All other dimensions have a block for
    each index. All factors are e4m3.
    """

    def activation(self, x: tf.Tensor, layout: str) -> RoundedFactor:
        """Returns the activations, rounded for each product; see `einsum.Rounding`."""
        return lambda summed: _rounded_blocks(x, E4M3, [_last(layout, summed)])

    def weight(self, x: tf.Tensor, layout: str, summed: str) -> RoundedFactor:
        """Returns the rounded weight; see `einsum.Rounding`."""
        others = "".join(letter for letter in layout if letter not in summed)
        rounded = _rounded_blocks(x, E4M3, [_last(layout, summed), _last(layout, others)])
        return lambda summed: rounded

    def gradient(self, x: tf.Tensor, layout: str) -> RoundedFactor:
        """Returns the gradient, rounded for each product; see `einsum.Rounding`."""
        return self.activation(x, layout)


# How factors are rounded, by the value of `step.precision`.
ROUNDINGS: dict[str, Rounding] = {"fp8": TensorScales(), "fp8_blocks": BlockScales()}
# Roundings whose products no compiler computes in 8 bits.
SIMULATED = frozenset({"fp8_blocks"})


def _last(layout: str, letters: str) -> int:
    """Returns the index of the last dimension that has one of the letters."""
    return max(index for index, letter in enumerate(layout) if letter in letters)


def _rounded(x: tf.Tensor, number_format: Format, axes: Sequence[int]) -> tf.Tensor:
    """Returns x rounded, in its own type.

    Args:
      x: the tensor.
      number_format: the type of 8 bits.
      axes: the dimensions that share a scale.
    """
    values = tf.cast(x, tf.float32)
    largest = tf.reduce_max(tf.abs(values), list(axes), keepdims=len(axes) < x.shape.rank)
    scale = _scale(largest, number_format)
    most = number_format.largest
    narrow = tf.cast(
        tf.clip_by_value(values / scale, -most, most), tf.as_dtype(number_format.dtype)
    )
    return tf.cast(narrow, x.dtype) * tf.cast(scale, x.dtype)


def _scale(largest: tf.Tensor, number_format: Format) -> tf.Tensor:
    """Returns float32 scales: powers of two, or what is not finite in the largest magnitudes."""
    ratio = tf.maximum(largest / number_format.largest, _SMALLEST)
    # The next power of two has no mantissa.
    bits = tf.bitcast(ratio, tf.int32) + _MANTISSA
    power = tf.bitcast(tf.bitwise.bitwise_and(bits, _EXPONENT), tf.float32)
    return tf.where(tf.math.is_finite(largest), power, largest)


def _rounded_blocks(x: tf.Tensor, number_format: Format, axes: Sequence[int]) -> tf.Tensor:
    """Returns x rounded with a scale for each block, in its own type.

    Args:
      x: the tensor.
      number_format: the type of 8 bits.
      axes: the dimensions that blocks extend over. All others have a block for each index.
    """
    sizes, shape, block_axes, padding = known_sizes(x.shape), [], [], []
    for axis, size in enumerate(sizes):
        block = min(size, _BLOCK) if axis in axes else 1
        blocks = -(-size // block)
        padding.append([0, blocks * block - size])
        shape.append(blocks)
        if axis in axes:
            block_axes.append(len(shape))
            shape.append(block)
    padded = tf.pad(x, padding) if any(after for _, after in padding) else x
    rounded = _rounded(tf.reshape(padded, shape), number_format, block_axes)
    rounded = tf.reshape(rounded, padded.shape)
    return tf.slice(rounded, [0] * len(sizes), sizes) if padded is not x else rounded
