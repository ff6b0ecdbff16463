"""Replaces the marks of kernels in a StableHLO module by the bodies for a platform."""

from __future__ import annotations

import re

import msgspec

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import func, ir, stablehlo
from lingvo_gshard.runtime import operations_of
from lingvo_gshard.sharding import KERNEL_BODIES, is_interpreted
from lingvo_gshard.wings.kernels.kernel import Kernel, marked

_CUSTOM_CALL = "stablehlo.custom_call"
_DTYPES = {
    **{"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "ui32": "uint32"},
    **{"f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2", "i8": "int8", "ui8": "uint8"},
}


@KERNEL_BODIES.register("kernels")
def replace_markers(module: ir.Module, platform: str) -> int:
    """Replaces the marks in a module by calls of functions that it adds; returns their number.

    Calls of a kernel with equal arguments and types share one function.
    """
    names: dict[tuple, str] = {}
    calls = _marked_calls(module)
    for kernel, operation in calls:
        config = _text(operation.attributes["backend_config"])
        key = (kernel.name, config, *(str(operand.type) for operand in operation.operands))
        if key not in names:
            names[key] = _add_body(module, kernel, config, operation, platform, len(names))
        _replace(operation, names[key])
    return len(calls)


def _marked_calls(module: ir.Module) -> list[tuple[Kernel, ir.Operation]]:
    calls = [each for each in operations_of(module) if each.name == _CUSTOM_CALL]
    found = [(marked(_text(call.attributes["call_target_name"])), call) for call in calls]
    return [(kernel, call) for kernel, call in found if kernel is not None]


def _text(attribute: ir.Attribute) -> str:
    return ir.StringAttr(attribute).value


def _add_body(
    module: ir.Module,
    kernel: Kernel,
    config: str,
    operation: ir.Operation,
    platform: str,
    number: int,
) -> str:
    """Adds a kernel's body for the types of a call to a module; returns the function's name."""
    static = msgspec.json.decode(config, type=kernel.config)
    body = kernel.body(platform)
    jitted = jax.jit(lambda *arrays: tuple(body(static, *arrays)), keep_unused=True)
    arguments = [_struct(operand.type) for operand in operation.operands]
    lowering_platform = "cpu" if is_interpreted(platform) else platform
    lowered = jitted.trace(*arguments).lower(lowering_platforms=(lowering_platform,))
    text = str(lowered.compiler_ir("stablehlo"))
    prefix = f"kernel_{kernel.name}_{number}_"
    body_module = ir.Module.parse(text)
    functions = [op for op in body_module.body.operations if op.operation.name == "func.func"]
    for name in {_text(each.attributes["sym_name"]) for each in functions}:
        text = re.sub(rf"@{re.escape(name)}(?![\w.])", f"@{prefix}{name}", text)
    for each in ir.Module.parse(text).body.operations:
        copied = each.operation.clone()
        for attributes in ("arg_attrs", "res_attrs"):
            if attributes in copied.attributes:
                del copied.attributes[attributes]
        copied.attributes["sym_visibility"] = ir.StringAttr.get("private")
        module.body.append(copied)
    return f"{prefix}main"


def _struct(operand_type: ir.Type) -> jax.ShapeDtypeStruct:
    tensor = ir.RankedTensorType(operand_type)
    dtype = jnp.dtype(_DTYPES[str(tensor.element_type)])
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)


def _replace(operation: ir.Operation, function: str) -> None:
    """Replaces a custom call, whose result may be a tuple, by the call of a function."""
    types = [result.type for result in operation.results]
    is_tuple = str(types[0]).startswith("tuple")
    if is_tuple:
        tuple_type = ir.TupleType(types[0])
        types = [tuple_type.get_type(i) for i in range(tuple_type.num_types)]
    with ir.InsertionPoint(operation), operation.location:
        call = func.CallOp(types, ir.FlatSymbolRefAttr.get(function), list(operation.operands))
        results = list(call.results)
        if is_tuple:
            results = [stablehlo.TupleOp(results).result]
    for old, new in zip(operation.results, results, strict=True):
        old.replace_all_uses_with(new)
    operation.erase()
