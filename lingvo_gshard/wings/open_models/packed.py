"""Packed tensors: weights that are published in 8 or 4 bits, with scales.

FP8: a matrix of float8_e4m3fn whose blocks, such as 128 x 128, have a scale each (DeepSeek-V3,
arXiv 2412.19437, section 3.3.2). The scales are a tensor of their own, `NAME_scale_inv`. A matrix
may also have one scale, and one for the input of its product, `activation_scale` (Devstral 2).

MXFP4: 32 neighbors of 4 bits share a scale, which is a power of 2 (Rouhani et al. 2023,
arXiv 2310.10537). The tensors `NAME_blocks` and `NAME_scales` hold the transposed weight.

NVFP4: 16 neighbors of 4 bits share a scale in float8_e4m3fn, and all share one in float32, which
multiplies (NVIDIA's modelopt) or divides (compressed-tensors, format nvfp4-pack-quantized).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.open_models.shards import Box, Published, Source

FP8, SCALE_SUFFIX = "F8_E4M3", "_scale_inv"
_INPUT_SCALE, _WEIGHT = ".activation_scale", ".weight"
# The block of a matrix that has one scale.
_WHOLE = (0, 0)
_BLOCKS, _SCALES = "_blocks", "_scales"
# Values in MXFP4 that share a scale, and bytes that hold them.
_GROUP, _GROUP_BYTES = 32, 16
# Values in NVFP4 that share a scale, and the names of the scale of all: whether it divides.
_NVFP4_GROUP = 16
_OF_ALL = {"weight_scale_2": False, "weight_global_scale": True}
# Tensors beside packed weights that are no weights: scales, also of activations and of caches.
_NO_WEIGHTS = (*_OF_ALL, "weight_scale", "input_scale", "input_global_scale", "k_scale", "v_scale")
_PACKED = "U8"
_NVFP4_KINDS = {("modelopt", "NVFP4"), ("compressed-tensors", "nvfp4-pack-quantized")}
# The exponent that the scale 1 is stored as.
_BIAS = 127
# Scales are chosen so that no value exceeds this one, the largest of float8_e4m3fn.
_LARGEST = 448.0
_FORMATS = (None, "e4m3", "float8_e4m3fn")
# float32 [256]: the value of each byte of float8_e4m3fn.
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4_VALUES = np.concatenate([_FP4, -_FP4])
# float32 [256,2]: the two values of each byte in 4 bits. The low bits are the first value.
_FP4_PAIRS = np.stack([np.tile(_FP4_VALUES, 16), np.repeat(_FP4_VALUES, 16)], axis=1)


class _ReadAsFloat32(Source):
    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class BlockScaled(_ReadAsFloat32):
    """A matrix in FP8 whose blocks have a scale each. It is read as float32.

    Attributes:
      values: the matrix [R,C] without scales.
      scales: the scale of each block.
      block: rows and columns of a block. Those at the end may be smaller. (0, 0) is the matrix.
      input_scale: the scale of the product's input, which an export writes as it was.
    """

    values: Published
    scales: Published
    block: tuple[int, int]
    input_scale: Published | None = None

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        """Returns a part of the matrix in float32, and the number of bytes that were read."""
        values, value_bytes = self.values.read_box(box)
        block = _sizes(self.block, self.shape)
        inner = [
            (start // size, -(-stop // size))
            for (start, stop), size in zip(box, block, strict=True)
        ]
        # One scale has no dimensions, or one.
        scales, scale_bytes = self.scales.read_box(inner[: len(self.scales.shape)])
        scales = scales.reshape([stop - start for start, stop in inner])
        found, (first, _) = _FP8_VALUES[values.view(np.uint8)], box[0]
        by_column = _columns(scales.astype(np.float32), block[1], box[1])
        for row, (start, stop) in enumerate(_spans(box[0], block[0])):
            found[start - first : stop - first] *= by_column[row]
        return found, value_bytes + scale_bytes


@dataclasses.dataclass(frozen=True)
class Mxfp4(_ReadAsFloat32):
    """Matrices [E,32G,R] in MXFP4, transposed. They are read as float32, exported as bfloat16.

    Attributes:
      blocks: uint8 [E,R,G,16], two values in a byte.
      scales: uint8 [E,R,G], the exponents of the scales.
    """

    blocks: Published
    scales: Published

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        """Returns a part of the tensor in float32, and the number of bytes that were read."""
        experts, (start, stop), rows = box
        first = start // _GROUP
        groups = (first, -(-stop // _GROUP))
        blocks, block_bytes = self.blocks.read_box([experts, rows, groups, (0, _GROUP_BYTES)])
        exponents, scale_bytes = self.scales.read_box([experts, rows, groups])
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
        part = _of_groups(blocks, scales, _GROUP, (start, stop))
        return part.swapaxes(-1, -2), block_bytes + scale_bytes


@dataclasses.dataclass(frozen=True)
class Nvfp4(_ReadAsFloat32):
    """A tensor [...,C] in NVFP4. It is read as float32, and exported as bfloat16.

    Attributes:
      values: uint8 [...,C/2], two values in a byte.
      scales: float8_e4m3fn [...,C/16].
      of_all: float32, one number, the scale of all values.
      divides: whether the scale of all divides.
    """

    values: Published
    scales: Published
    of_all: Published
    divides: bool

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        """Returns a part of the tensor in float32, and the number of bytes that were read."""
        *rows, (start, stop) = box
        first, last = start // _NVFP4_GROUP, -(-stop // _NVFP4_GROUP)
        size = _NVFP4_GROUP // 2
        values, value_bytes = self.values.read_box([*rows, (first * size, last * size)])
        narrow, scale_bytes = self.scales.read_box([*rows, (first, last)])
        of_all, scales = self.of_all.read().reshape(()), _FP8_VALUES[narrow.view(np.uint8)]
        scales = scales / of_all if self.divides else scales * of_all
        part = _of_groups(values, scales, _NVFP4_GROUP, (start, stop))
        return part, value_bytes + scale_bytes + of_all.nbytes


def _of_groups(
    codes: np.ndarray, scales: np.ndarray, size: int, span: tuple[int, int]
) -> np.ndarray:
    """Returns a span of the last dimension of values in 4 bits, times the scales of groups."""
    found = _FP4_PAIRS[codes].reshape(*scales.shape, size) * scales[..., None]
    first = span[0] // size * size
    return found.reshape(*scales.shape[:-1], -1)[..., span[0] - first : span[1] - first]


def unpack(
    tensors: Mapping[str, Published], packing: Mapping[str, Any] | None, where: str
) -> dict[str, Source]:
    """Returns the tensors of a model by the names that they have when they are not packed.

    Args:
      tensors: name -> tensor in its file.
      packing: `quantization_config` of the config; None if nothing is packed.
      where: the config, for messages.

    Raises:
      UserError: the packing is not supported, or a tensor lacks its scales.
    """
    if not packing:
        return dict(tensors)
    method = packing.get("quant_method")
    if method == "fp8":
        return _unpack_fp8(tensors, _block_of(packing, where), where)
    if method == "mxfp4":
        return _unpack_mxfp4(tensors, where)
    kind = packing.get("quant_algo" if method == "modelopt" else "format")
    if (method, kind) in _NVFP4_KINDS:
        return _unpack_nvfp4(tensors, where)
    shown = f"{method!r} ({kind})" if kind else repr(method)
    raise UserError(
        f"{where}: the tensors are packed by quant_method={shown} of the quantization_config; "
        "'fp8', 'mxfp4', 'modelopt' (NVFP4) or 'compressed-tensors' (nvfp4-pack-quantized) was "
        "expected. Load them with transformers, with dequantize=True in the quantization_config, "
        "and save_pretrained"
    )


def _block_of(packing: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Returns rows and columns of a block in FP8."""
    block, form = packing.get("weight_block_size"), packing.get("fmt")
    if form in _FORMATS and "weight_block_size" in packing and block is None:
        return _WHOLE
    sizes = [s for s in block if isinstance(s, int) and s > 0] if isinstance(block, list) else []
    if len(sizes) != 2 or sizes != block:
        raise UserError(
            f"{where}: weight_block_size of the quantization_config is {block!r}; two numbers, "
            "such as [128, 128], were expected"
        )
    if form not in _FORMATS:
        raise UserError(
            f"{where}: fmt of the quantization_config is {form!r}, which is not supported; 'e4m3' "
            "was expected"
        )
    return sizes[0], sizes[1]


def _unpack_fp8(
    tensors: Mapping[str, Published], block: tuple[int, int], where: str
) -> dict[str, Source]:
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in tensors:
            continue
        if name.endswith(_INPUT_SCALE) and name.removesuffix(_INPUT_SCALE) + _WEIGHT in tensors:
            continue
        if tensor.dtype != FP8:
            found[name] = tensor
            continue
        scales = tensors.get(f"{name}{SCALE_SUFFIX}")
        shape = scales_shape(tensor.shape, block)
        is_one = block == _WHOLE and scales is not None and scales.shape in ((), (1,))
        if scales is None or not (is_one or scales.shape == shape):
            seen = "are missing" if scales is None else f"have the shape {scales.shape}"
            raise UserError(
                f"{where}: the scales of {name}, {name}{SCALE_SUFFIX}, {seen}; the shape "
                f"{() if block == _WHOLE else shape} was expected"
            )
        own = tensors.get(input_scale(name))
        found[name] = BlockScaled(name, tensor.shape, FP8, tensor, scales, block, own)
    return found


def _unpack_mxfp4(tensors: Mapping[str, Published], where: str) -> dict[str, Source]:
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if name.endswith(_SCALES) and f"{base}{_BLOCKS}" in tensors:
            continue
        if not name.endswith(_BLOCKS):
            found[name] = tensor
            continue
        scales = tensors.get(f"{base}{_SCALES}")
        is_group = len(tensor.shape) == 4 and tensor.shape[-1] == _GROUP_BYTES
        if scales is None or not is_group or scales.shape != tensor.shape[:-1]:
            raise UserError(
                f"{where}: {name} has the shape {tensor.shape}, and {base}{_SCALES} "
                f"{scales.shape if scales else 'is missing'}; [E,R,G,{_GROUP_BYTES}] and [E,R,G] "
                "were expected"
            )
        experts, rows, groups, _ = tensor.shape
        found[base] = Mxfp4(base, (experts, groups * _GROUP, rows), "BF16", tensor, scales)
    return found


def _unpack_nvfp4(tensors: Mapping[str, Published], where: str) -> dict[str, Source]:
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind in _NO_WEIGHTS:
            continue
        if tensor.dtype != _PACKED:
            found[name] = tensor
            continue
        shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
        scales, own = tensors.get(f"{base}.weight_scale"), f"{base}{_WEIGHT}"
        of_all = [n for n in _OF_ALL if (t := tensors.get(f"{base}.{n}")) and t.shape in ((), (1,))]
        expected = (*shape[:-1], shape[-1] // _NVFP4_GROUP)
        if not of_all or scales is None or (scales.dtype, scales.shape) != (FP8, expected):
            raise UserError(
                f"{where}: {name} has the shape {tensor.shape}; {base}.weight_scale of the shape "
                f"{expected} in {FP8} was expected, and {base}.{' or '.join(_OF_ALL)} of one number"
            )
        one = tensors[f"{base}.{of_all[0]}"]
        found[own] = Nvfp4(own, shape, "BF16", tensor, scales, one, _OF_ALL[of_all[0]])
    return found


def input_scale(name: str) -> str:
    """Returns the name of the scale of the input that a matrix is multiplied with."""
    return name.removesuffix(_WEIGHT) + _INPUT_SCALE


def scales_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix in FP8."""
    return tuple(-(-size // part) for size, part in zip(shape, _sizes(block, shape), strict=False))


def _sizes(block: tuple[int, int], shape: Sequence[int]) -> tuple[int, int]:
    """Returns rows and columns of the blocks of a matrix."""
    return (shape[0], shape[1]) if block == _WHOLE else block


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
    packed = np.empty(matrix.shape, ml_dtypes.float8_e4m3fn)
    shape, block = scales.shape, _sizes(block, matrix.shape)
    scales = scales.reshape(scales_shape(matrix.shape, block))
    kept = scales.copy()
    starts = np.arange(0, columns, block[1])
    for index, (start, stop) in enumerate(_spans((0, rows), block[0])):
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
        packed[start:stop] = quantized
    return packed, kept.reshape(shape)


def _quantize(values: np.ndarray, scales: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of a block row in FP8, and what they stand for, in float32."""
    by_column = _columns(scales.astype(np.float32), size, (0, values.shape[1]))
    divisors = np.where(by_column == 0, np.float32(1), by_column)
    clipped = np.clip(values / divisors, -_LARGEST, _LARGEST)
    quantized = clipped.astype(ml_dtypes.float8_e4m3fn)
    return quantized, _FP8_VALUES[quantized.view(np.uint8)] * by_column


def _columns(scales: np.ndarray, size: int, span: tuple[int, int]) -> np.ndarray:
    """Returns the scale of each column of a span, in the last dimension.

    `scales` has one scale for each block that the span touches. A block has `size` columns.
    """
    start, stop = span
    return scales[..., np.arange(start, stop) // size - start // size]


def _spans(span: tuple[int, int], size: int) -> Iterator[tuple[int, int]]:
    """Yields the parts of a span that lie in one block each."""
    start, stop = span
    while start < stop:
        end = min((start // size + 1) * size, stop)
        yield start, end
        start = end
