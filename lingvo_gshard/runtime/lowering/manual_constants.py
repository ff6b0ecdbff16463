"""Gives each use of a constant its own copy, which XLA's partitioner needs around manual regions.

Before partitioning, XLA merges equal constants wherever they are used. A constant that a manual
region uses becomes manual, and a computation outside the region that shares it cannot be
partitioned: the process aborts with `Check failed: !IsManualLeaf()`. XLA does not merge constants
of different functions, and inlines functions only right before it partitions.
"""

from __future__ import annotations

from lingvo_gshard.core.lazy import func, ir
from lingvo_gshard.runtime.lowering.annotations import ENTERS_REGION, call_target

_CONSTANT = ("stablehlo.constant", "stablehlo.iota")
# Operations whose bodies hold constants that can become calls. A reduction's body cannot.
_AROUND = ("func.func", "stablehlo.while", "stablehlo.case", "stablehlo.if")


def separate_constants(module: ir.Module) -> None:
    """Moves every constant into a function of its own, in a module with manual regions."""
    constants: list[ir.Operation] = []
    has_regions = False

    def visit(operation: ir.Operation) -> ir.WalkResult:
        nonlocal has_regions
        has_regions |= call_target(operation) == ENTERS_REGION
        if operation.name in _CONSTANT and operation.parent.name in _AROUND:
            constants.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if has_regions:
        for index, constant in enumerate(constants):
            _make_call(constant, f"constant_{index}", module)


def _make_call(constant: ir.Operation, name: str, module: ir.Module) -> None:
    """Replaces a constant by a call of a new function that returns it."""
    types = [result.type for result in constant.results]
    with constant.location:
        with ir.InsertionPoint(module.body):
            function = func.FuncOp(name, ([], types), visibility="private")
        with ir.InsertionPoint(function.add_entry_block()):
            func.ReturnOp(constant.clone().results)
        with ir.InsertionPoint(constant):
            call = func.CallOp(function, [])
    constant.results[0].replace_all_uses_with(call.results[0])
    constant.erase()
