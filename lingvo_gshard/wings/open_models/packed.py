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
_INPUT_SCALE, WEIGHT = ".activation_scale", ".weight"
# The block of a matrix that has one scale.
_WHOLE = (0, 0)
BLOCKS, SCALES = "_blocks", "_scales"
# Values in MXFP4 that share a scale, and bytes that hold them.
MXFP4_GROUP, GROUP_BYTES = 32, 16
# Values in NVFP4 that share a scale, and the names of the scale of all: whether it divides.
NVFP4_GROUP = 16
OF_ALL = {"weight_scale_2": False, "weight_global_scale": True}
# Tensors beside packed weights that are no weights: scales, also of activations and of caches.
INPUT_SCALES = ("input_scale", "input_global_scale", "k_scale", "v_scale")
_NOWEIGHTS = (*OF_ALL, "weight_scale", *INPUT_SCALES)
PACKED = "U8"
_NVFP4_KINDS = {("modelopt", "NVFP4"), ("compressed-tensors", "nvfp4-pack-quantized")}
# The exponent that the scale 1 is stored as.
BIAS = 127
_FORMATS = (None, "e4m3", "float8_e4m3fn")
# float32 [256]: the value of each byte of float8_e4m3fn.
FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4_VALUES = np.concatenate([FP4, -FP4])
# float32 [256,2]: the two values of each byte in 4 bits. The low bits are the first value.
_FP4_PAIRS = np.stack([np.tile(_FP4_VALUES, 16), np.repeat(_FP4_VALUES, 16)], axis=1)


class PackedSource(Source):
    """A tensor that is published in fewer bits, with scales. It is read as float32."""

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)

    @property
    def kept(self) -> tuple[Published, ...]:
        """Small tensors that an export reads again, such as scales."""
        return ()


@dataclasses.dataclass(frozen=True)
class BlockScaled(PackedSource):
    """A matrix in FP8 whose blocks have a scale each.

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

    @property
    def kept(self) -> tuple[Published, ...]:
        return tuple(filter(None, (self.scales, self.input_scale)))

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        """Returns a part of the matrix in float32, and the number of bytes that were read."""
        values, value_bytes = self.values.read_box(box)
        block = block_sizes(self.block, self.shape)
        inner = [
            (start // size, -(-stop // size))
            for (start, stop), size in zip(box, block, strict=True)
        ]
        # One scale has no dimensions, or one.
        scales, scale_bytes = self.scales.read_box(inner[: len(self.scales.shape)])
        scales = scales.reshape([stop - start for start, stop in inner])
        found, (first, _) = FP8_VALUES[values.view(np.uint8)], box[0]
        by_column = columns_of(scales.astype(np.float32), block[1], box[1])
        for row, (start, stop) in enumerate(spans(box[0], block[0])):
            found[start - first : stop - first] *= by_column[row]
        return found, value_bytes + scale_bytes


@dataclasses.dataclass(frozen=True)
class Mxfp4(PackedSource):
    """Matrices [E,32G,R] in MXFP4, transposed.

    Attributes:
      blocks: uint8 [E,R,G,16], two values in a byte.
      scales: uint8 [E,R,G], the exponents of the scales.
    """

    blocks: Published
    scales: Published

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        """Returns a part of the tensor in float32, and the number of bytes that were read."""
        experts, (start, stop), rows = box
        first = start // MXFP4_GROUP
        groups = (first, -(-stop // MXFP4_GROUP))
        blocks, block_bytes = self.blocks.read_box([experts, rows, groups, (0, GROUP_BYTES)])
        exponents, scale_bytes = self.scales.read_box([experts, rows, groups])
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - BIAS)
        part = _of_groups(blocks, scales, MXFP4_GROUP, (start, stop))
        return part.swapaxes(-1, -2), block_bytes + scale_bytes


@dataclasses.dataclass(frozen=True)
class Nvfp4(PackedSource):
    """A tensor [...,C] in NVFP4.

    Attributes:
      values: uint8 [...,C/2], two values in a byte.
      scales: float8_e4m3fn [...,C/16].
      of_all: float32, one number, the scale of all values.
      divides: whether the scale of all divides.
      others: tensors beside it that are written as they were, such as the scale of inputs.
    """

    values: Published
    scales: Published
    of_all: Published
    divides: bool
    others: tuple[Published, ...]

    @property
    def kept(self) -> tuple[Published, ...]:
        return self.of_all, *self.others

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        """Returns a part of the tensor in float32, and the number of bytes that were read."""
        *rows, (start, stop) = box
        first, last = start // NVFP4_GROUP, -(-stop // NVFP4_GROUP)
        size = NVFP4_GROUP // 2
        values, value_bytes = self.values.read_box([*rows, (first * size, last * size)])
        narrow, scale_bytes = self.scales.read_box([*rows, (first, last)])
        of_all, scales = self.of_all.read().reshape(()), FP8_VALUES[narrow.view(np.uint8)]
        scales = scales / of_all if self.divides else scales * of_all
        part = _of_groups(values, scales, NVFP4_GROUP, (start, stop))
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
        if name.endswith(_INPUT_SCALE) and name.removesuffix(_INPUT_SCALE) + WEIGHT in tensors:
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
        base = name.removesuffix(BLOCKS).removesuffix(SCALES)
        if name.endswith(SCALES) and f"{base}{BLOCKS}" in tensors:
            continue
        if not name.endswith(BLOCKS):
            found[name] = tensor
            continue
        scales = tensors.get(f"{base}{SCALES}")
        is_group = len(tensor.shape) == 4 and tensor.shape[-1] == GROUP_BYTES
        if scales is None or not is_group or scales.shape != tensor.shape[:-1]:
            raise UserError(
                f"{where}: {name} has the shape {tensor.shape}, and {base}{SCALES} "
                f"{scales.shape if scales else 'is missing'}; [E,R,G,{GROUP_BYTES}] and [E,R,G] "
                "were expected"
            )
        experts, rows, groups, _ = tensor.shape
        found[base] = Mxfp4(base, (experts, groups * MXFP4_GROUP, rows), "BF16", tensor, scales)
    return found


def _unpack_nvfp4(tensors: Mapping[str, Published], where: str) -> dict[str, Source]:
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind in _NOWEIGHTS:
            continue
        if tensor.dtype != PACKED:
            found[name] = tensor
            continue
        shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
        scales, own = tensors.get(f"{base}.weight_scale"), f"{base}{WEIGHT}"
        of_all = [n for n in OF_ALL if (t := tensors.get(f"{base}.{n}")) and t.shape in ((), (1,))]
        expected = (*shape[:-1], shape[-1] // NVFP4_GROUP)
        if not of_all or scales is None or (scales.dtype, scales.shape) != (FP8, expected):
            raise UserError(
                f"{where}: {name} has the shape {tensor.shape}; {base}.weight_scale of the shape "
                f"{expected} in {FP8} was expected, and {base}.{' or '.join(OF_ALL)} of one number"
            )
        one, divides = tensors[f"{base}.{of_all[0]}"], OF_ALL[of_all[0]]
        beside = (tensors.get(f"{base}.{each}") for each in INPUT_SCALES)
        others = tuple(filter(None, beside))
        found[own] = Nvfp4(own, shape, "BF16", tensor, scales, one, divides, others)
    return found


def input_scale(name: str) -> str:
    """Returns the name of the scale of the input that a matrix is multiplied with."""
    return name.removesuffix(WEIGHT) + _INPUT_SCALE


def scales_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix in FP8."""
    return tuple(
        -(-size // part) for size, part in zip(shape, block_sizes(block, shape), strict=False)
    )


def block_sizes(block: tuple[int, int], shape: Sequence[int]) -> tuple[int, int]:
    """Returns rows and columns of the blocks of a matrix."""
    return (shape[0], shape[1]) if block == _WHOLE else block


def columns_of(scales: np.ndarray, size: int, span: tuple[int, int]) -> np.ndarray:
    """Returns the scale of each column of a span, in the last dimension.

    `scales` has one scale for each block that the span touches. A block has `size` columns.
    """
    start, stop = span
    return scales[..., np.arange(start, stop) // size - start // size]


def spans(span: tuple[int, int], size: int) -> Iterator[tuple[int, int]]:
    """Yields the parts of a span that lie in one block each."""
    start, stop = span
    while start < stop:
        end = min((start // size + 1) * size, stop)
        yield start, end
        start = end
