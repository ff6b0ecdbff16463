"""Rewrites a lowered program to compute in float64 wherever it computes in float32.

In float32, two orders of one sum differ by rounding. That is enough to send a token to another
expert, or to move an activation over the kink of a ReLU. Gradients then differ by a hundredth.
In float64 such cases are a billion times rarer, so a difference means something.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from lingvo_gshard.core.lazy import ir, mlir, stablehlo
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import Program

_CONSTANT = re.compile(r'dense<("0x[0-9A-Fa-f]*"|[^">]*)>( : tensor<(?:\d+x)*)f32>')
_BITS = re.compile(r"\b0x([0-9A-Fa-f]{8})\b")
_DECIMAL = re.compile(r"[-+]?\d+\.\d*(?:[eE][-+]?\d+)?")
_BITCAST = re.compile(
    r"^(\s*)(%\S+) = stablehlo\.bitcast_convert (%\S+) :"
    r" \((tensor<(?:\d+x)*\w+>)\) -> (tensor<(?:\d+x)*\w+>)(.*)$",
    re.MULTILINE,
)
# Stands for float32 where it must stay.
_KEPT = "f<32>"


def in_float64(program: Program) -> Program:
    """Returns the program with float64 in place of float32, in its arguments and results, too."""
    with mlir.make_ir_context() as made:
        module = stablehlo.deserialize_portable_artifact(made, program.module)
        # The names of layers are debug information.
        text: Any = module.operation.get_asm(enable_debug_info=True)
        module = ir.Module.parse(to_float64(text))
        version = stablehlo.get_minimum_version()
        portable = bytes(stablehlo.serialize_portable_artifact(module, version, True))
    return dataclasses.replace(
        program,
        module=portable,
        inputs=tuple(map(_widened, program.inputs)),
        outputs=tuple(map(_widened, program.outputs)),
    )


def to_float64(text: str) -> str:
    """Returns the text of a StableHLO module with float64 in place of float32."""
    text = _BITCAST.sub(_with_casts, text)
    text = _CONSTANT.sub(lambda found: f"dense<{_wide(found[1])}>{found[2]}f64>", text)
    return re.sub(r"(?<=[x<( ])f32\b", "f64", text).replace(_KEPT, "f32")


def _with_casts(found: re.Match[str]) -> str:
    """Returns a bitcast whose float32 side stays what it is, with a conversion on that side."""
    indent, result, operand, source, target, rest = found.groups()
    if "f32>" not in source and "f32>" not in target:
        return found[0]
    kept_source, kept_target = (x.replace("f32>", f"{_KEPT}>") for x in (source, target))
    name = "%narrow_" + re.sub(r"\W", "_", result)
    if "f32>" in source:
        return (
            f"{indent}{name} = stablehlo.convert {operand} : ({source}) -> {kept_source}\n"
            f"{indent}{result} = stablehlo.bitcast_convert {name} : "
            f"({kept_source}) -> {target}{rest}"
        )
    return (
        f"{indent}{name} = stablehlo.bitcast_convert {operand} : ({source}) -> {kept_target}\n"
        f"{indent}{result} = stablehlo.convert {name} : ({kept_target}) -> {target}{rest}"
    )


def _wide(content: str) -> str:
    """Returns the content of a dense float32 constant for float64."""
    if content.startswith('"0x'):
        values = np.frombuffer(bytes.fromhex(content[3:-1]), np.float32)
        return f'"0x{values.astype(np.float64).tobytes().hex().upper()}"'
    # In float32 0.1 is another number than in float64.
    content = _DECIMAL.sub(lambda number: f"{float(np.float32(number[0])):.16e}", content)
    return _BITS.sub(lambda bits: f"0x{_wide_bits(bits[1])}", content)


def _wide_bits(bits: str) -> str:
    value = np.frombuffer(bytes.fromhex(bits)[::-1], np.float32).astype(np.float64)
    return value.tobytes()[::-1].hex().upper()


def _widened(array: Array) -> Array:
    return dataclasses.replace(array, dtype="float64") if array.dtype == "float32" else array
