"""Floating-point operations of HLO instructions; a multiply-add is two.

TPU compilers make convolutions of matrix products, also of batched ones: then the batch is a window
over a dilated base, in which most taps meet the zeros between the data. Those do not count.
"""

from __future__ import annotations

import functools
import math
import re

import numpy as np

from lingvo_gshard.hlo.text import Instruction

_ELEMENTWISE = frozenset(
    """abs add and atan2 cbrt ceil clamp compare complex convert cosine divide erf exponential
    exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply
    negate not or popcnt power real reduce-precision remainder round-nearest-afz
    round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign
    sine sqrt stochastic-convert subtract tan tanh xor""".split()
)
_PASSES = {"default": 1, "high": 3, "highest": 6}
_ALGORITHM_PASSES = re.compile(r"_x(\d)$")
_LARGEST_TABLE = 2**22


def is_matmul(instruction: Instruction) -> bool:
    """Whether it is a matrix product, or a convolution."""
    return instruction.opcode in ("dot", "convolution") or _is_library_matmul(instruction)


def matmul_flops(instruction: Instruction) -> int:
    """Returns the operations of a matrix product or convolution; 0 of anything else."""
    if instruction.opcode == "dot":
        left = instruction.operands[0].shape.dimensions
        summed = _integers(instruction.attributes.get("lhs_contracting_dims", ""))
        return 2 * instruction.shape.size * math.prod(left[index] for index in summed)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction)
    if _is_library_matmul(instruction):
        return _library_flops(instruction)
    return 0


def passes(instruction: Instruction) -> int:
    """Returns how often the matrix unit of a TPU runs for this product, by its precision.

    float32 is 1 pass of bfloat16 by default, 3 at high and 6 at highest precision, as in
    https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision.
    """
    algorithm = _ALGORITHM_PASSES.search(instruction.attributes.get("algorithm", ""))
    if algorithm:
        return int(algorithm[1])
    if instruction.operands[0].shape.dtype not in ("f32", "f64"):
        return 1
    words = instruction.attributes.get("operand_precision", "").strip("{}").split(",")
    return max(_PASSES.get(word.strip(), 1) for word in words)


def other_flops(instruction: Instruction, count: int) -> int:
    """Returns the operations for `count` elements of an elementwise operation or a reduction."""
    opcode = instruction.opcode
    if opcode in _ELEMENTWISE:
        return count
    if opcode == "reduce":
        share = count / max(instruction.shape.size, 1)
        inputs = instruction.operands[: len(instruction.operands) // 2]
        return round(sum(operand.shape.size for operand in inputs) * share)
    if opcode == "reduce-window":
        sizes = _window(instruction)["size"]
        return count * math.prod(int(size) for size in sizes.split("x"))
    return 0


def _convolution_flops(instruction: Instruction) -> int:
    left, right = (operand.shape.dimensions for operand in instruction.operands[:2])
    out = instruction.shape.dimensions
    labels = re.split(r"_|->", instruction.attributes["dim_labels"])
    left_at, right_at, out_at = ({label: i for i, label in enumerate(part)} for part in labels)
    window = _window(instruction)
    taps = 1
    spatial = [label for label in labels[0] if label.isdigit()]
    for index, label in enumerate(sorted(spatial, key=int)):
        taps *= _taps(
            left[left_at[label]],
            right[right_at[label]],
            out[out_at[label]],
            **_of_dimension(window, index),
        )
    batches = int(instruction.attributes.get("batch_group_count", 1))
    return 2 * taps * right[right_at["i"]] * right[right_at["o"]] * left[left_at["b"]] // batches


def _window(instruction: Instruction) -> dict[str, str]:
    text = instruction.attributes.get("window", "").strip("{}")
    return dict(part.split("=", 1) for part in text.split())


def _of_dimension(window: dict[str, str], index: int) -> dict[str, int]:
    def number(key: str) -> int:
        return int(window[key].split("x")[index]) if key in window else 1

    low = int(window["pad"].split("x")[index].split("_")[0]) if "pad" in window else 0
    return {
        "stride": number("stride"),
        "low": low,
        "left_dilation": number("lhs_dilate"),
        "right_dilation": number("rhs_dilate"),
    }


@functools.lru_cache(maxsize=2**12)
def _taps(
    base: int, window: int, out: int, stride: int, low: int, left_dilation: int, right_dilation: int
) -> int:
    """Pairs of an output position and a tap that meets data, along one dimension."""
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
    target = instruction.attributes.get("custom_call_target", "").lower()
    return instruction.opcode == "custom-call" and ("matmul" in target or "gemm" in target)


def _library_flops(instruction: Instruction) -> int:
    """Of a product [..., M, K] x [..., K, N] -> [..., M, N], whichever of the two is transposed."""
    left, right = (operand.shape for operand in instruction.operands[:2])
    out = instruction.shape.arrays[0]
    batch = math.prod(out.dimensions[:-2]) or 1
    return 2 * out.size * math.isqrt(left.size * right.size // (out.size * batch or 1))


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.strip("{}").split(",") if number.strip()]
