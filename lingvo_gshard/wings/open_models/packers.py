"""Packers: what a tensor with scales is published as, made again from a weight.

Blocks that training did not change keep their values. In FP8 they keep their scales, too. In 4 bits
a block has the scale, of those that make its largest magnitude a value of the type, with the least
squared error, as in "Four over six" (Cook et al. 2025, arXiv 2512.02010).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from lingvo_gshard.wings.open_models import packed
from lingvo_gshard.wings.open_models.shards import Published, Tensor

# The largest values of float8_e4m3fn and of float4_e2m1fn.
_LARGEST, _LARGEST_FP4 = 448.0, float(packed.FP4[-1])
# Values that are packed at once.
_AT_ONCE = 2**24


@dataclasses.dataclass(frozen=True)
class Packer(abc.ABC):
    """Makes what one tensor is published as.

    Attributes:
      name: the tensor's name when it is not packed.
      kept: tensors beside it that are written as they were, such as scales of inputs.
    """

    name: str
    shape: tuple[int, ...]
    kept: tuple[Published, ...]

    @property
    @abc.abstractmethod
    def made(self) -> tuple[Tensor, ...]:
        """The tensors that `pack` makes."""

    @abc.abstractmethod
    def pack(self, weight: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the array of each tensor of `made`, in their order.

        Args:
          weight: the tensor before it is packed, in the type that a run stores.
        """

    def values(
        self, names: Sequence[str], unpacked: Callable[[str], np.ndarray]
    ) -> list[np.ndarray]:
        """Returns some of the published tensors.

        Args:
          names: their names.
          unpacked: returns the weight of a name.
        """
        found = {tensor.name: tensor.read() for tensor in self.kept if tensor.name in names}
        if len(found) < len(names):
            for tensor, value in zip(self.made, self.pack(unpacked(self.name)), strict=False):
                found[tensor.name] = value
                if found.keys() >= {*names}:
                    break
        return [found[name] for name in names]


@dataclasses.dataclass(frozen=True)
class Fp8Packer(Packer):
    """Packs a matrix in FP8.

    Attributes:
      scales: the scales that it was published with.
      block: rows and columns of a block.
    """

    scales: Published
    block: tuple[int, int]

    @property
    def made(self) -> tuple[Tensor, ...]:
        return Tensor(self.name, self.shape, packed.FP8), self.scales

    def pack(self, weight: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the matrix in FP8, and its scales; see the base class."""
        yield from pack_fp8(weight, self.scales.read(), self.block)


@dataclasses.dataclass(frozen=True)
class Mxfp4Packer(Packer):
    """Packs matrices [E,32G,R] in MXFP4. What it makes is transposed."""

    @property
    def made(self) -> tuple[Tensor, ...]:
        experts, columns, rows = self.shape
        shape = (experts, rows, columns // packed.MXFP4_GROUP)
        blocks = Tensor(f"{self.name}{packed.BLOCKS}", (*shape, packed.GROUP_BYTES), packed.PACKED)
        return blocks, Tensor(f"{self.name}{packed.SCALES}", shape, packed.PACKED)

    def pack(self, weight: np.ndarray) -> Iterator[np.ndarray]:
        """Yields uint8 [E,R,G,16], and the exponents of the scales, uint8 [E,R,G]."""
        blocks = weight.swapaxes(-1, -2).reshape(*self.made[1].shape, packed.MXFP4_GROUP)
        _, power = np.frexp(np.abs(blocks).max(-1).astype(np.float32))
        # With the first one the largest magnitude is 4 to 7.9, which may be clipped to 6.
        exponents = [
            np.clip(power + packed.BIAS - 3 + up, 0, 254).astype(np.uint8) for up in (0, 1)
        ]
        yield from _pack_fp4(
            blocks, exponents, lambda e: np.ldexp(np.float32(1), e.astype(np.int32) - packed.BIAS)
        )


@dataclasses.dataclass(frozen=True)
class Nvfp4Packer(Packer):
    """Packs a tensor [...,16G] in NVFP4.

    Attributes:
      packed_name: name of its values.
      of_all: the scale of all values that it was published with.
      divides: whether that scale divides.
    """

    packed_name: str
    of_all: Published
    divides: bool

    @property
    def made(self) -> tuple[Tensor, ...]:
        *rows, columns = self.shape
        values = Tensor(self.packed_name, (*rows, columns // 2), packed.PACKED)
        scales = f"{self.name}_scale", (*rows, columns // packed.NVFP4_GROUP), packed.FP8
        return self.of_all, values, Tensor(*scales)

    def pack(self, weight: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the scale of all values, the values, uint8 [...,8G], and float8_e4m3fn [...,G].

        The scale of all values stays as it was published, unless a magnitude is too large for it.
        """
        blocks = weight.reshape(*self.shape[:-1], -1, packed.NVFP4_GROUP)
        largest = np.abs(blocks).max(-1).astype(np.float32)
        one, most = self.of_all.read(), largest.max() / (_LARGEST * _LARGEST_FP4)
        unit = 1 / one.reshape(()) if self.divides else one.reshape(())
        # A run in bfloat16 rounds the largest magnitude, perhaps up.
        if most > unit * (1 + 2**-8):
            unit, one = most, np.full_like(one, 1 / most if self.divides else most)
        yield one
        of_all = one.reshape(())

        def meaning(scales: np.ndarray) -> np.ndarray:
            found = packed.FP8_VALUES[scales.view(np.uint8)]
            return found / of_all if self.divides else found * of_all

        smallest = packed.FP8_VALUES[1]
        scales = [
            np.clip(largest / (level * unit), smallest, _LARGEST).astype(ml_dtypes.float8_e4m3fn)
            for level in packed.FP4[:0:-1]
        ]
        codes, chosen = _pack_fp4(blocks, scales, meaning)
        yield codes.reshape(self.made[1].shape)
        yield chosen


def _pack_fp4(
    blocks: np.ndarray, scales: Sequence[np.ndarray], meaning: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns blocks in 4 bits, two values in a byte, and the scale of each, the best one.

    Args:
      blocks: [...,G].
      scales: possible scales of each block, [...], in the type that they are published in.
      meaning: returns the factors that scales stand for, in float32.
    """
    size = blocks.shape[-1]
    flat, choices = blocks.reshape(-1, size), [each.reshape(-1) for each in scales]
    codes = np.empty(flat.shape, np.uint8)
    chosen, step = np.empty_like(choices[0]), max(_AT_ONCE // size, 1)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        values = flat[part].astype(np.float32)
        least = np.full(len(values), np.inf, np.float32)
        for choice in choices:
            factors = meaning(choice[part])[:, None]
            fit = np.clip(values / factors, -_LARGEST_FP4, _LARGEST_FP4)
            fit = fit.astype(ml_dtypes.float4_e2m1fn)
            error = np.square(fit.astype(np.float32) * factors - values).sum(1)
            is_better = error < least
            least = np.where(is_better, error, least)
            codes[part] = np.where(is_better[:, None], fit.view(np.uint8), codes[part])
            chosen[part] = np.where(is_better, choice[part], chosen[part])
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return pairs.reshape(*blocks.shape[:-1], size // 2), chosen.reshape(blocks.shape[:-1])


def pack_fp8(
    matrix: np.ndarray, scales: np.ndarray, block: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a matrix in FP8, and its scales.

    Blocks that the given scales reproduce keep their scale, so that the export of an import equals
    the original. The scale of any other block makes its largest magnitude the largest value of FP8.

    Args:
      matrix: [R,C], in the type that a run stores.
      scales: the scales that the matrix was published with.
      block: rows and columns of a block.
    """
    rows, columns = matrix.shape
    result = np.empty(matrix.shape, ml_dtypes.float8_e4m3fn)
    shape, block = scales.shape, packed.block_sizes(block, matrix.shape)
    scales = scales.reshape(packed.scales_shape(matrix.shape, block))
    kept = scales.copy()
    starts = np.arange(0, columns, block[1])
    for index, (start, stop) in enumerate(packed.spans((0, rows), block[0])):
        part = matrix[start:stop]
        values = part.astype(np.float32)
        quantized, back = _quantize(values, scales[index], block[1])
        same = (back.astype(part.dtype) == part).all(0)
        is_changed = ~np.logical_and.reduceat(same, starts)
        if is_changed.any():
            largest = np.maximum.reduceat(np.abs(values).max(0), starts) / _LARGEST
            fresh = np.where(largest > 0, largest, 1.0).astype(scales.dtype)
            kept[index] = np.where(is_changed, fresh, scales[index])
            quantized, _ = _quantize(values, kept[index], block[1])
        result[start:stop] = quantized
    return result, kept.reshape(shape)


def _quantize(values: np.ndarray, scales: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of a block row in FP8, and what they stand for, in float32."""
    by_column = packed.columns_of(scales.astype(np.float32), size, (0, values.shape[1]))
    divisors = np.where(by_column == 0, np.float32(1), by_column)
    clipped = np.clip(values / divisors, -_LARGEST, _LARGEST)
    quantized = clipped.astype(ml_dtypes.float8_e4m3fn)
    return quantized, packed.FP8_VALUES[quantized.view(np.uint8)] * by_column


def fp8_packer(
    name: str, shape: tuple[int, ...], block: tuple[int, int], small: Mapping[str, Published]
) -> Fp8Packer | None:
    """Returns the packer of a tensor that was published in FP8; None for another one.

    Args:
      block: rows and columns of a block.
      small: the small tensors of an import by name, such as scales.
    """
    scales, own = small.get(f"{name}{packed.SCALE_SUFFIX}"), small.get(packed.input_scale(name))
    return scales and Fp8Packer(name, shape, (own,) if own else (), scales, block)


def fp4_packer(name: str, shape: tuple[int, ...], small: Mapping[str, Published]) -> Packer:
    """Returns the packer of a tensor that was published in MXFP4 or NVFP4; see `fp8_packer`."""
    base = name.removesuffix(packed.WEIGHT)
    for kind, divides in packed.OF_ALL.items():
        if of_all := small.get(f"{base}.{kind}"):
            kept = tuple(
                small[n] for n in (f"{base}.{k}" for k in packed.INPUT_SCALES) if n in small
            )
            packed_name = f"{name}_packed" if divides else name
            return Nvfp4Packer(name, shape, kept, packed_name, of_all, divides)
    return Mxfp4Packer(name, shape, ())
