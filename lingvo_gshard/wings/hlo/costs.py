"""Counts the floating-point operations of HLO instructions and the bytes that they move.

TPU compilers write matrix products as convolutions. A batched product becomes a window over a
dilated base, where most taps meet the zeros between the data. Those taps do not count.

A fusion counts as one instruction, since the values within it are not in memory. Arrays in another
memory cause no traffic; on a TPU, memory space 1 is the vector memory. Arrays count with the
padding of their tiles.

The rules follow XLA's HloCostAnalysis; demand.py has its address.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import scopes
from lingvo_gshard.wings.hlo import demand, tpu_slices
from lingvo_gshard.wings.hlo.collectives import KINDS
from lingvo_gshard.wings.hlo.messages import ALGORITHMS, PRECISIONS
from lingvo_gshard.wings.hlo.module import Instruction, Shape, element_bits
from lingvo_gshard.wings.hlo.operations import FusedAttention

_ELEMENTWISE = frozenset(
    """abs add and atan2 cbrt ceil clamp compare complex convert cosine divide erf exponential
    exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply
    negate not or popcnt power real reduce-precision remainder round-nearest-afz
    round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign
    sine sqrt stochastic-convert subtract tan tanh xor""".split()
)
_ALGORITHM_PASSES = re.compile(r"_X(\d)$")
# By the number of a precision.
_PRECISION_PASSES = {
    PRECISIONS.index(name): passes for name, passes in (("DEFAULT", 1), ("HIGH", 3), ("HIGHEST", 6))
}
# Stands for the call of instructions of no kernel.
_NO_CALL = scopes.FusedCall("", 0.0, 1.0)
# HLO's types of queries, keys and values, and of the factors of grouped products.
_ATTENTION_DTYPES = frozenset("bf16 f16 f32".split())
_GROUPED_DTYPES = _ATTENTION_DTYPES | frozenset("f8e4m3fn f8e5m2 s8".split())
# cuDNN reads two arrays each, lengths and offsets, for the segments of queries and of keys.
_PACKED_OPERANDS = 4
# cuDNN's convolutions, by the beginning of their targets -> which of (first operand, second,
# result) are the input, the kernel and the output of the convolution.
_CUDNN_CONVOLUTIONS = {
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
    "__cudnn$conv": (0, 1, 2),
}
# The taps of long windows are counted in tables of at most this many entries.
_LARGEST_TABLE = 2**22


def is_matmul(instruction: Instruction) -> bool:
    """Returns whether an instruction is a matrix product or a convolution."""
    is_product = instruction.opcode in ("dot", "convolution") or _is_library_matmul(instruction)
    is_product = is_product or bool(_convolution_roles(instruction))
    return is_product or is_fused_attention(instruction) or is_grouped_products(instruction)


def product_dtype(instruction: Instruction) -> str:
    """Returns HLO's type of the factors of a product, or of a fused attention's queries."""
    if is_fused_attention(instruction):
        return _attention_operands(instruction)[0].dtype
    if is_grouped_products(instruction):
        return _grouped_rows(instruction)[0].dtype
    return instruction.operands[0].shape.dtype


def fused_attention(instruction: Instruction) -> FusedAttention | None:
    """Returns the attention that an instruction computes as one kernel; None for all others."""
    if not is_fused_attention(instruction):
        return None
    return FusedAttention(
        keys=_number_of_keys(instruction),
        is_gradient=_call(instruction).kernel.endswith("gradient"),
        is_cudnn=_is_cudnn(instruction),
        head_dim=_attention_operands(instruction)[0].dimensions[-1],
    )


def is_fused_attention(instruction: Instruction) -> bool:
    """Returns whether an instruction is a call of an attention's kernel (folder kernels)."""
    is_attention = _call(instruction).kernel.removeprefix("cache_").startswith("attention")
    fewest = 2 if _reads_cache(instruction) else 3
    return is_attention and len(_attention_operands(instruction)) >= fewest


def _reads_cache(instruction: Instruction) -> bool:
    """Returns whether an instruction is a part of attention to the visible slots of a cache."""
    return _call(instruction).kernel == "cache_attention"


def is_grouped_products(instruction: Instruction) -> bool:
    """Returns whether an instruction is a call of the kernel of grouped products."""
    if not _call(instruction).kernel.startswith("grouped_products"):
        return False
    # The kernel's body also has calls that reserve memory.
    return bool(_grouped_rows(instruction)) and len(instruction.operands) > 2


def _call(instruction: Instruction) -> scopes.FusedCall:
    """Returns the call of a kernel; one without a name for all other instructions."""
    found = (
        scopes.FusedCall.of(instruction.op_name) if instruction.opcode == "custom-call" else None
    )
    return found or _NO_CALL


def matmul_flops(instruction: Instruction) -> int:
    """Returns the FLOPs of a product, convolution or kernel of products; 0 for all others."""
    if instruction.opcode == "dot":
        left = instruction.operands[0].shape.dimensions
        contracted = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
        return 2 * instruction.shape.size * math.prod(left[index] for index in contracted)
    if roles := _convolution_roles(instruction):
        return _convolution_flops(instruction, roles)
    if _is_library_matmul(instruction):
        return _library_flops(instruction)
    if is_fused_attention(instruction):
        return _attention_flops(instruction)
    if is_grouped_products(instruction):
        return _grouped_flops(instruction)
    return 0


def _attention_operands(instruction: Instruction) -> list[Shape]:
    """Returns shapes of the queries, keys, values [B,N,length,D] and what follows them.

    The compiler for TPUs leaves out a B of 1. A latent cache has no values: they are its keys.
    """
    found = (_operands(instruction, rank, _ATTENTION_DTYPES) for rank in (4, 3))
    return next(filter(None, found), [])


def _number_of_keys(instruction: Instruction) -> int:
    keys = _attention_operands(instruction)[1].dimensions
    # cuDNN reads lengths and offsets of packed segments, and then arrays [B,length,N,D].
    is_packed = len(_operands(instruction, 2, {"s32"})) >= _PACKED_OPERANDS and _is_cudnn(
        instruction
    )
    return keys[1] if is_packed else keys[-2]


def _is_cudnn(instruction: Instruction) -> bool:
    return instruction.proto.custom_call_target.startswith("__cudnn")


def _grouped_rows(instruction: Instruction) -> list[Shape]:
    """Returns shapes of the operands of rank 2 of grouped products; the rows [R,M] are first."""
    return _operands(instruction, 2, _GROUPED_DTYPES)


def _operands(instruction: Instruction, rank: int, dtypes: Collection[str]) -> list[Shape]:
    shapes = [operand.shape for operand in instruction.operands]
    return [s for s in shapes if len(s.dimensions) == rank and s.dtype in dtypes]


def _grouped_flops(instruction: Instruction) -> int:
    """Returns the FLOPs that the kernel of grouped products computes.

    Its operands are rows [R,M] and weights [E,M,H], maybe several of both, or rows [R,M] and
    gradients [R,H] of products for the gradient [E,M,H] of the weights. The share counts rows that
    pad tiles, too.
    """
    share = _call(instruction).share
    result = instruction.shape.arrays[0]
    rows = _grouped_rows(instruction)
    if len(result.dimensions) == 3:
        _, inner, outer = result.dimensions
        # The kernel may take the rows transposed.
        count = rows[0].size // inner
        return round(2 * count * inner * outer * share)
    count, outer = result.dimensions
    inner = rows[0].size // count
    # Scales have three dimensions as well.
    weights = [
        shape
        for shape in _operands(instruction, 3, _GROUPED_DTYPES)
        if sorted(shape.dimensions[1:]) == sorted((inner, outer))
    ]
    return round(2 * count * outer * inner * len(weights) * share)


def _attention_flops(instruction: Instruction) -> int:
    """Returns the FLOPs of the products that a kernel of an attention computes.

    The forward pass has two products of queries by keys by D. The gradient of the queries takes
    three, since the weights are computed again. The gradients of keys and values take four, and all
    gradients together five (Dao 2023, arXiv 2307.08691, section 2.2).
    """
    name, share, _ = _call(instruction)
    operands = _attention_operands(instruction)[:3]
    query, keys, *others = (shape.dimensions for shape in operands)
    values = others[0] if others else keys
    # Kernels for TPUs also return memory that they work in. cuDNN returns gradients [B,N,length,D]
    # of packed segments, too.
    known = {(shape.dtype, tuple(sorted(shape.dimensions))) for shape in operands}
    results = [(shape.dtype, tuple(sorted(shape.dimensions))) for shape in instruction.shape.arrays]
    gradients = sum(result in known for result in results)
    # One kernel for all gradients returns the terms [B,terms,N,L,D] of the queries' gradient.
    gradients += any(
        len(shape.dimensions) > len(query) and shape.dimensions[-3:] == query[-3:]
        for shape in instruction.shape.arrays
    )
    # Products over D of the keys, and over D of the values.
    of_keys, of_values = {1: (2, 1), 2: (2, 2), 3: (3, 2)}.get(gradients, (1, 1))
    if not name.endswith("gradient"):
        of_keys, of_values = 1, 1
    pairs = math.prod(query[:-1]) * _number_of_keys(instruction) * share
    return round(2 * pairs * (of_keys * query[-1] + of_values * values[-1]))


def passes(instruction: Instruction) -> int:
    """Returns the number of passes that a TPU's matrix unit makes for a product.

    A float32 product takes 1 bfloat16 pass at default precision, 3 at high and 6 at highest, as in
    https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision.
    """
    config = instruction.proto.precision_config
    algorithm = _ALGORITHM_PASSES.search(ALGORITHMS.get(config.algorithm, ""))
    if algorithm:
        return int(algorithm[1])
    if product_dtype(instruction) not in ("f32", "f64"):
        return 1
    return max((_PRECISION_PASSES.get(each, 1) for each in config.operand_precision), default=1)


def other_flops(instruction: Instruction, count: int) -> int:
    """Returns the FLOPs for `count` result elements of an elementwise operation or a reduction."""
    opcode = instruction.opcode
    if opcode in _ELEMENTWISE:
        return count
    if opcode == "reduce":
        share = count / max(instruction.shape.size, 1)
        inputs = instruction.operands[: len(instruction.operands) // 2]
        return round(sum(operand.shape.size for operand in inputs) * share)
    if opcode == "reduce-window":
        return count * math.prod(each.size for each in instruction.proto.window.dimensions)
    return 0


def _convolution_roles(instruction: Instruction) -> tuple[int, ...]:
    """Returns which of a convolution's arrays are its input, kernel and output; () for others."""
    if instruction.opcode == "convolution":
        return _CUDNN_CONVOLUTIONS["__cudnn$conv"]
    target = instruction.proto.custom_call_target
    found = (roles for name, roles in _CUDNN_CONVOLUTIONS.items() if target.startswith(name))
    return next(found, ())


def _convolution_flops(instruction: Instruction, roles: tuple[int, ...]) -> int:
    # cuDNN also returns the memory that it worked in.
    arrays = [*(operand.shape for operand in instruction.operands[:2]), instruction.shape.arrays[0]]
    left, right, out = (arrays[at].dimensions for at in roles)
    proto = instruction.proto
    windows = [
        (each.stride, each.padding_low, each.base_dilation, each.window_dilation)
        for each in proto.window.dimensions
    ]
    groups = max(proto.batch_group_count, 1)
    numbers = proto.convolution_dimension_numbers
    return convolution_flops(numbers, left, right, out, windows) // groups


def convolution_flops(
    numbers: Any,
    left: Sequence[int],
    right: Sequence[int],
    out: Sequence[int],
    windows: Iterable[tuple[int, int, int, int]],
) -> int:
    """Returns the FLOPs of a convolution of all groups of a batch.

    `numbers` has the dimensions of the arrays, as HLO and StableHLO name them. A window has the
    stride, the low padding and the dilations of input and kernel of a spatial dimension.
    """
    spatial = zip(
        numbers.input_spatial_dimensions,
        numbers.kernel_spatial_dimensions,
        numbers.output_spatial_dimensions,
        windows,
        strict=True,
    )
    taps = math.prod(
        _taps_with_data(left[x], right[k], out[y], *window) for x, k, y, window in spatial
    )
    features = right[numbers.kernel_input_feature_dimension]
    features *= right[numbers.kernel_output_feature_dimension]
    return 2 * taps * features * left[numbers.input_batch_dimension]


@functools.lru_cache(maxsize=2**12)
def _taps_with_data(
    base: int, window: int, out: int, stride: int, low: int, left_dilation: int, right_dilation: int
) -> int:
    """Returns the pairs of an output position and a tap that meets data, along one dimension."""
    dilated = (base - 1) * left_dilation + 1 if base else 0
    rows = max(1, _LARGEST_TABLE // max(window, 1))
    taps = np.arange(window, dtype=np.int64)[None] * right_dilation - low
    total = 0
    for start in range(0, out, rows):
        positions = np.arange(start, min(start + rows, out), dtype=np.int64)[:, None]
        at = positions * stride + taps
        total += np.count_nonzero((at >= 0) & (at < dilated) & (at % left_dilation == 0))
    return int(total)


def _is_library_matmul(instruction: Instruction) -> bool:
    if instruction.opcode != "custom-call":
        return False
    target = instruction.proto.custom_call_target.lower()
    return any(part in target for part in ("matmul", "gemm", "scaleddot"))


def _library_flops(instruction: Instruction) -> int:
    """FLOPs of [..., M, K] x [..., K, N] -> [..., M, N]; either operand may be transposed."""
    left, right = (operand.shape for operand in instruction.operands[:2])
    out = instruction.shape.arrays[0]
    batch = math.prod(out.dimensions[:-2]) or 1
    return 2 * out.size * math.isqrt(left.size * right.size // (out.size * batch or 1))


FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast after-all add-dependency partition-id
    replica-id optimization-barrier opt-barrier domain while conditional call""".split()
)
# ConcatBitcast sees neighboring buffers as one.
_FREE_TARGETS = frozenset(
    "AllocateBuffer ConcatBitcast Sharding SPMDFullToShardShape SPMDShardToFullShape".split()
)


def is_free(instruction: Instruction) -> bool:
    """Returns whether an instruction executes nothing itself.

    What a loop, conditional or call executes is counted by the instructions that it calls. What
    is received from other slices is counted by the instruction that sends.
    """
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")) or tpu_slices.is_receive(instruction):
        return True
    return opcode in FREE or instruction.proto.custom_call_target in _FREE_TARGETS


def memory_bytes(instruction: Instruction) -> int:
    """Returns the bytes that one execution reads and writes."""
    if is_free(instruction):
        return 0
    if tpu_slices.is_send(instruction):
        arrays = tpu_slices.sent(instruction) + tpu_slices.received(instruction)
        return round(sum(_array_bytes(array) for array in arrays))
    if instruction.opcode == "fusion":
        (called,) = instruction.called
        if called.root.proto.custom_call_target == demand.ASYNC_DONE:
            return 0
    return _read(instruction) + _written(instruction)


def _read(instruction: Instruction) -> int:
    operands = instruction.operands
    if instruction.opcode.endswith("-start"):
        reads_all = instruction.base_opcode in (*KINDS, "async", "fusion", "custom-call", "call")
        made = instruction.result.size
        amounts = [o.shape.size if reads_all else min(o.shape.size, made) for o in operands]
    else:
        amounts = demand.operand_demand(instruction, instruction.shape.size)
        if _reads_cache(instruction):
            # A layer with a window reads the blocks of the cache that its window meets. All others
            # read a full row: how many slots are filled is known only when the step runs.
            cache = _attention_operands(instruction)[1:]
            amounts = _part_of(instruction, amounts, cache, _call(instruction).share)
        elif _call(instruction).kernel.startswith("grouped"):
            # The weights of groups without rows are not read, nor are the rows of no group.
            weights = _operands(instruction, 3, _GROUPED_DTYPES)
            amounts = _part_of(instruction, amounts, weights, _call(instruction).read_share)
            rows = _grouped_rows(instruction)
            amounts = _part_of(instruction, amounts, rows, min(_call(instruction).share, 1.0))
    used: dict[Instruction, int] = {}
    for operand, amount in zip(operands, amounts, strict=False):
        used[operand] = max(used.get(operand, 0), amount)
    return sum(_bytes(operand.shape, amount) for operand, amount in used.items())


def _part_of(
    instruction: Instruction, amounts: Sequence[int], arrays: Sequence[Shape], share: float
) -> list[int]:
    """Returns the elements of each operand if a kernel reads a share of some arrays."""
    return [
        round(amount * share) if operand.shape in arrays else amount
        for operand, amount in zip(instruction.operands, amounts, strict=True)
    ]


def _written(instruction: Instruction) -> int:
    shape = instruction.result
    if _call(instruction).kernel.startswith("grouped"):
        share = min(_call(instruction).share, 1.0)
        rows = [array for array in shape.arrays if len(array.dimensions) == 2]
        unused = (1.0 - share) * sum(map(_array_bytes, rows))
        return round(sum(map(_array_bytes, shape.arrays)) - unused)
    if _is_cudnn(instruction):
        # The workspace of cuDNN is mostly room for segments that rows do not have.
        return round(sum(_array_bytes(array) for array in shape.arrays if array.dtype != "u8"))
    if instruction.opcode != "fusion":
        return _bytes(shape, min(demand.written(instruction), shape.size))
    (called,) = instruction.called
    elements = list(shape.elements or ())
    if called.root.proto.custom_call_target == demand.ASYNC_START:
        return _bytes(elements[1], elements[1].size)
    if called.root.opcode != "tuple":
        return _bytes(shape, demand.written(called.root))
    return sum(
        _bytes(part, demand.written_tuple_element(made))
        for part, made in zip(elements, called.root.operands, strict=True)
    )


def _bytes(shape: Shape, elements: int) -> int:
    """The bytes in main memory of a share of a shape, given by its number of elements."""
    share = elements / max(shape.size, 1)
    return round(sum(_array_bytes(array) for array in shape.arrays) * share)


def _array_bytes(array: Shape) -> float:
    return array.size * element_bits(array.dtype) / 8 * array.padding if array.space == 0 else 0.0
