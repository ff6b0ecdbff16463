"""Rounds the factors of products to 8 bits in training.

A factor is divided by a scale, rounded to a type of 8 bits, and multiplied by the scale again. Sums
are in float32. The values of all types are exact in bfloat16: a device without products in 8 bits
computes the same sums as one with them.

  e4m3  floating point with 4 bits of exponent and 3 of mantissa, up to 448
  e5m2  floating point with 5 bits of exponent and 2 of mantissa, up to 57344
  int8  whole numbers up to 127

Micikevicius et al. 2022, arXiv 2209.05433, define the first two. Their scales are powers of two,
as small as the largest magnitude allows. Multiplying by a power of two is exact.

Programs have products of values that were converted from 8 bits to bfloat16. XLA for TPUs computes
them in 8 bits, on devices that can. XLA for GPUs calls cuBLASLt in FP8, which also multiplies each
factor by one scale. On all other devices, and where a factor has several scales, the result is
multiplied by the scales. Kernels of grouped products take scales of rows, columns and blocks, and
kernels for Blackwell take scales of 32 numbers each.

A tensor of zeros stays zero. An infinity or a NaN spreads to all numbers that share its scale, so
that no overflow is hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.core import known_sizes, tf
from lingvo_gshard.sharding import Blocks, Factor, FactorFor, Rounding, hardware_of, platform_in_use
from lingvo_gshard.wings.low_precision.block_products import BlockProduct

# Size of a block of DeepSeek-V3, arXiv 2412.19437, section 3.3.2, and of an MX format.
BLOCK, MX_BLOCK = 128, 32
# The smallest scale: float32 has no smaller number of full precision.
_SMALLEST = 2.0**-126
# float32 numbers: the bits of the exponent, and the largest mantissa.
_EXPONENT, _MANTISSA = 0x7F800000, 0x007FFFFF


@dataclasses.dataclass(frozen=True)
class Format:
    """A type of 8 bits, by TensorFlow's name."""

    dtype: str
    largest: float


E4M3 = Format("float8_e4m3fn", 448.0)
E5M2 = Format("float8_e5m2", 57344.0)
INT8 = Format("int8", 127.0)


class EachProduct:
    """A rounding that rounds each factor for each of its products. No kernel computes them."""

    def _rounded(self, x: tf.Tensor, layout: str, summed: str) -> Factor:
        """Returns a tensor that is rounded for a product that sums over some of its letters."""
        raise NotImplementedError

    def activation(self, x: tf.Tensor, layout: str) -> FactorFor:
        """Returns the activations, rounded for each product; see `einsum.Rounding`."""
        return lambda summed: self._rounded(x, layout, summed)

    def weight(self, x: tf.Tensor, layout: str, summed: str) -> FactorFor:
        """Returns the weight, rounded for each product; see `einsum.Rounding`."""
        del summed
        return self.activation(x, layout)

    def gradient(self, x: tf.Tensor, layout: str) -> FactorFor:
        """Returns the gradient, rounded for each product; see `einsum.Rounding`."""
        return self.activation(x, layout)

    def row_format(self, is_gradient: bool) -> tuple[str, int] | None:
        """Returns None: operations round rows."""
        del is_gradient

    def product(
        self, left: str, right: str, output: str, weight: str, first: Factor, second: Factor
    ) -> tf.Tensor | None:
        """Returns None: `einsum` computes the product."""
        del left, right, output, weight, first, second


@dataclasses.dataclass(frozen=True)
class TensorScales(EachProduct):
    """One scale for each tensor, from its largest magnitude in the same step.

    Attributes:
      forward: type of activations and weights.
      backward: type of gradients.
    """

    forward: Format = E4M3
    backward: Format = E5M2
    rounds_weight_gradients: bool = dataclasses.field(default=True, init=False)

    @property
    def by_rows(self) -> Rounding:
        """The rounding with a scale for each row and column; see `einsum.Rounding`."""
        return RowScales(self.forward, self.backward)

    def activation(self, x: tf.Tensor, layout: str) -> FactorFor:
        del layout
        return self._of_any_product(x, 0, self.forward)

    def weight(self, x: tf.Tensor, layout: str, summed: str) -> FactorFor:
        del layout, summed
        return self._of_any_product(x, 1, self.forward)

    def gradient(self, x: tf.Tensor, layout: str) -> FactorFor:
        del layout
        return self._of_any_product(x, 2, self.backward)

    def _of_any_product(self, x: tf.Tensor, role: int, number_format: Format) -> FactorFor:
        """Returns the rounded tensor, which is the same for all products.

        The role is 0 for activations, 1 for a weight, and 2 for a gradient.
        """
        values, scale = self._scaled(tf.cast(x, tf.float32), role, number_format)
        factor = Factor(tf.cast(_narrow(values, scale, number_format), x.dtype), scale)
        if hardware_of(platform_in_use()) == "cuda":
            factor = Factor(factor.values * tf.cast(scale, x.dtype))
        return lambda summed: factor

    def _scaled(
        self, values: tf.Tensor, role: int, number_format: Format
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns what is divided by a scale, and the scale; see `_of_any_product`."""
        del role
        return values, scale_of(values, number_format)


@dataclasses.dataclass(frozen=True)
class DelayedScales(TensorScales):
    """One scale for each tensor, from its largest magnitudes in earlier steps.

    Numbers that are larger now are clipped. A product whose weight has no history has scales of its
    own step, as with `TensorScales`. See delayed_scales.py.

    Attributes:
      largest: float32 [3], the magnitudes of activations, weight and gradients; None without a
        history.
    """

    largest: tf.Tensor | None = None

    def _scaled(
        self, values: tf.Tensor, role: int, number_format: Format
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if self.largest is None:
            return super()._scaled(values, role, number_format)
        # A clipped infinity would be hidden.
        values = tf.where(tf.math.is_inf(values), np.nan, values)
        return values, _power_of_two(self.largest[role], number_format)


@dataclasses.dataclass(frozen=True)
class BlockScales(EachProduct):
    """A scale for each block of numbers, as in DeepSeek-V3, arXiv 2412.19437, section 3.3.

    Blocks of activations and gradients are up to 128 numbers along the last dimension that a
    product sums over. Blocks of weights are up to 128 x 128 numbers, along the last dimension that
    the forward pass sums over and the last one of the others. All other dimensions have a block for
    each index. All factors are e4m3.
    """

    rounds_weight_gradients: bool = True

    @property
    def by_rows(self) -> Rounding:
        """The rounding whose blocks lie within a row; see `einsum.Rounding`."""
        return BlockScales(rounds_weight_gradients=False)

    def row_format(self, is_gradient: bool) -> tuple[str, int] | None:
        """Returns the format of blocks within a row; see `einsum.Rounding`."""
        del is_gradient
        return E4M3.dtype, BLOCK

    def _rounded(self, x: tf.Tensor, layout: str, summed: str) -> Factor:
        return _rounded_blocks(x, [last_of(layout, summed)])

    def weight(self, x: tf.Tensor, layout: str, summed: str) -> FactorFor:
        others = "".join(letter for letter in layout if letter not in summed)
        factor = _rounded_blocks(x, [last_of(layout, summed), last_of(layout, others)])
        return lambda summed: factor


@dataclasses.dataclass(frozen=True)
class RowScales(EachProduct):
    """A scale for each row and each column of the two matrices of a product.

    The products for gradients of weights are not rounded, as in MaxText's recipe of AQT,
    https://github.com/AI-Hypercomputer/maxtext/blob/main/MaxText/layers/quantizations.py.

    Attributes:
      forward: type of activations and weights.
      backward: type of gradients.
    """

    forward: Format = INT8
    backward: Format = INT8
    rounds_weight_gradients: bool = dataclasses.field(default=False, init=False)

    @property
    def by_rows(self) -> Rounding:
        """This rounding; see `einsum.Rounding`."""
        return self

    def row_format(self, is_gradient: bool) -> tuple[str, int] | None:
        """Returns the format of whole rows; None for int8, whose scales are no powers of two."""
        number_format = self.backward if is_gradient else self.forward
        return None if number_format is INT8 else (number_format.dtype, 0)

    def _rounded(self, x: tf.Tensor, layout: str, summed: str) -> Factor:
        return _rows(x, layout, summed, self.forward)

    def gradient(self, x: tf.Tensor, layout: str) -> FactorFor:
        return lambda summed: _rows(x, layout, summed, self.backward)


@dataclasses.dataclass(frozen=True)
class MxScales(EachProduct):
    """A scale for each 32 numbers along the sum: MXFP8 (Rouhani et al. 2023, arXiv 2310.10537).

    All factors are e4m3, and scales are rounded up, as Mishra et al. 2025, arXiv 2506.08027,
    recommend.
    """

    rounds_weight_gradients: bool = dataclasses.field(default=True, init=False)

    @property
    def by_rows(self) -> Rounding:
        """The rounding of dropless experts: grouped products have blocks of 128."""
        return BlockScales(rounds_weight_gradients=False)

    def _rounded(self, x: tf.Tensor, layout: str, summed: str) -> Factor:
        return _rounded_blocks(x, [layout.index(summed[-1])], MX_BLOCK)

    def product(
        self, left: str, right: str, output: str, weight: str, first: Factor, second: Factor
    ) -> tf.Tensor | None:
        """Returns the product by the platform's kernel, if it has one; see `einsum.Rounding`."""
        return BlockProduct(left, right, output, weight).compute(first, second)


# Another value of `step.precision`, whose rounding nvfp4.py has.
NVFP4 = "nvfp4"
# Values of `step.precision` -> the rounding of factors.
ROUNDINGS: dict[str, Rounding] = {
    "fp8": TensorScales(),
    "fp8_blocks": BlockScales(),
    "mxfp8": MxScales(),
    "int8": RowScales(),
}
# Roundings whose products no compiler computes in 8 bits. Kernels do, of dropless experts.
SIMULATED = frozenset({"fp8_blocks"})
# Roundings whose products in 8 bits are kernels.
BY_KERNELS = frozenset({"mxfp8"})


def last_of(layout: str, letters: str) -> int:
    """Returns the index of the last dimension that has one of the letters."""
    return max(index for index, letter in enumerate(layout) if letter in letters)


def _rows(x: tf.Tensor, layout: str, summed: str, number_format: Format) -> Factor:
    """Returns x rounded to a type of 8 bits, with a scale for all numbers that a product sums."""
    values = tf.cast(x, tf.float32)
    axes = [layout.index(letter) for letter in summed]
    if number_format is INT8:
        scale = tf.reduce_max(magnitudes(values), axes, keepdims=True) / INT8.largest
        narrow = tf.cast(tf.round(tf.math.divide_no_nan(values, scale)), tf.int8)
    else:
        narrow, scale = _round(values, number_format, axes)
    return Factor(tf.cast(narrow, x.dtype), scale, number_format.dtype)


def _round(
    values: tf.Tensor, number_format: Format, axes: Sequence[int] | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns numbers of 8 bits, and the float32 scales to multiply them by; see `scale_of`."""
    scale = scale_of(values, number_format, axes)
    return _narrow(values, scale, number_format), scale


def _narrow(values: tf.Tensor, scale: tf.Tensor, number_format: Format) -> tf.Tensor:
    """Returns numbers of 8 bits: values over their scale, or the largest that there is."""
    most = number_format.largest
    fitting = tf.clip_by_value(values / scale, -most, most)
    return tf.cast(fitting, tf.as_dtype(number_format.dtype))


def largest_magnitude(x: tf.Tensor) -> tf.Tensor:
    """Returns the largest magnitude of a tensor, a float32 scalar; infinity if there is a NaN."""
    return tf.reduce_max(magnitudes(tf.cast(x, tf.float32)))


def magnitudes(values: tf.Tensor) -> tf.Tensor:
    """Returns magnitudes, with infinity for NaN: the largest of numbers with a NaN is undefined."""
    return tf.where(tf.math.is_nan(values), np.inf, tf.abs(values))


def scale_of(
    values: tf.Tensor, number_format: Format, axes: Sequence[int] | None = None
) -> tf.Tensor:
    """Returns float32 scales: powers of two, or infinity for an infinite magnitude.

    Args:
      values: the float32 tensor that is divided by the scales.
      number_format: the type of 8 bits.
      axes: the dimensions that share a scale, of size 1 in the result; None for one scalar.
    """
    largest = tf.reduce_max(magnitudes(values), axes, keepdims=axes is not None)
    return _power_of_two(largest, number_format)


def _power_of_two(largest: tf.Tensor, number_format: Format) -> tf.Tensor:
    """Returns the smallest scales that bring magnitudes into the range of a type of 8 bits."""
    ratio = tf.maximum(largest / number_format.largest, _SMALLEST)
    # The next power of two has no mantissa.
    bits = tf.bitcast(ratio, tf.int32) + _MANTISSA
    power = tf.bitcast(tf.bitwise.bitwise_and(bits, _EXPONENT), tf.float32)
    return tf.where(tf.math.is_finite(largest), power, largest)


def in_blocks(
    x: tf.Tensor, axes: Sequence[int], most: int
) -> tuple[tf.Tensor, list[int], list[int], Callable[[tf.Tensor], tf.Tensor]]:
    """Cuts a tensor into blocks of up to `most` along some axes, and of 1 along others.

    Returns:
      x in float32, where each of the axes has become two, blocks and numbers of a block; the second
      ones; the number of blocks along each axis of x; and a function that undoes the cutting.
    """
    sizes, counts, shape, block_axes, padding = known_sizes(x.shape), [], [], [], []
    for axis, size in enumerate(sizes):
        block = min(size, most) if axis in axes else 1
        blocks = -(-size // block)
        padding.append([0, blocks * block - size])
        counts.append(blocks)
        shape.append(blocks)
        if axis in axes:
            block_axes.append(len(shape))
            shape.append(block)
    padded = tf.pad(x, padding) if any(after for _, after in padding) else x

    def whole(blocks: tf.Tensor) -> tf.Tensor:
        found = tf.reshape(blocks, padded.shape)
        return tf.slice(found, [0] * len(sizes), sizes) if padded is not x else found

    return tf.reshape(tf.cast(padded, tf.float32), shape), block_axes, counts, whole


def _rounded_blocks(x: tf.Tensor, axes: Sequence[int], most: int = BLOCK) -> Factor:
    """Returns x rounded to e4m3 with a scale for each block of `in_blocks`, in the type of x."""
    blocks, block_axes, counts, whole = in_blocks(x, axes, most)
    values, scale = _round(blocks, E4M3, block_axes)
    narrow = tf.cast(values, x.dtype)
    found = Blocks(whole(narrow), tf.reshape(scale, counts), most, E4M3.dtype)
    return Factor(whole(narrow * tf.cast(scale, x.dtype)), blocks=found)
