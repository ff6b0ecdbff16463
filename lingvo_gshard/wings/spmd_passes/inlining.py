"""Moves the bodies of functions into the loops and reducers that call them.

TensorFlow makes a function of what it computes for all stages of a pipeline at once. The loop over
ticks then calls it, and what the loop adds up is out of sight. XLA inlines calls right before it
partitions, which is too late for loop_sums.py.

TensorFlow makes a function of a reducer that several reductions share. XLA's simplification of
StableHLO takes a call for a side effect: it keeps a reduction whose results nobody needs, and ends
the process when it removes these results one by one.
"""

from __future__ import annotations

import collections

from lingvo_gshard.core.lazy import ir
from lingvo_gshard.runtime import operations_of

_WHILE, _REDUCE, _CALL = "stablehlo.while", "stablehlo.reduce", "func.call"
_CUSTOM_CALL, _COMPUTATIONS = "stablehlo.custom_call", "called_computations"


def inline_in_loops(module: ir.Module) -> None:
    """Replaces each call within a loop of `main` by the operations of its function.

    A function with several callers is left as it is. If loops call any, functions that nothing
    refers to are removed first: they may call the same ones.
    """
    main = ir.SymbolTable(module.operation)["main"].operation
    if not any(_is_in_loop(call, main) for call in _calls(main)):
        return
    _remove_uncalled(module)
    symbols = ir.SymbolTable(module.operation)
    callers = collections.Counter(_callee(call) for call in _calls(module.operation))
    while calls := [
        call for call in _calls(main) if callers[_callee(call)] == 1 and _is_in_loop(call, main)
    ]:
        for call in calls:
            _inline(call, symbols[_callee(call)].operation)


def inline_in_reducers(module: ir.Module) -> None:
    """Replaces each call within a reducer by a copy of its function's operations."""
    symbols = ir.SymbolTable(module.operation)
    for call in _calls(module.operation):
        if call.parent is not None and call.parent.operation.name == _REDUCE:
            _copy(symbols[_callee(call)].operation, call)


def _remove_uncalled(module: ir.Module) -> None:
    """Removes the functions that neither `main` refers to nor a function that it refers to."""
    functions = {
        ir.StringAttr(each.attributes["sym_name"]).value: each.operation
        for each in module.body.operations
        if each.operation.name == "func.func"
    }
    found, waiting = {"main"}, ["main"]
    while waiting:
        operation = functions[waiting.pop()]
        called = {_callee(call) for call in _calls(operation)} | _computations(operation)
        waiting += called - found
        found |= called
    for name, function in functions.items():
        if name not in found:
            function.erase()


def _calls(operation: ir.Operation) -> list[ir.Operation]:
    return [each for each in operations_of(operation) if each.name == _CALL]


def _computations(operation: ir.Operation) -> set[str]:
    """Returns the functions that custom calls within an operation refer to."""
    calls = [each for each in operations_of(operation) if each.name == _CUSTOM_CALL]
    named = [each.attributes[_COMPUTATIONS] for each in calls if _COMPUTATIONS in each.attributes]
    return {ir.FlatSymbolRefAttr(name).value for names in named for name in ir.ArrayAttr(names)}


def _callee(call: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _is_in_loop(operation: ir.Operation, main: ir.Operation) -> bool:
    parent = operation.parent
    while parent is not None and parent.operation != main:
        if parent.operation.name == _WHILE:
            return True
        parent = parent.operation.parent
    return False


def _inline(call: ir.Operation, function: ir.Operation) -> None:
    """Moves the operations of a function, which has no other caller, before its call."""
    (block,) = function.regions[0].blocks
    for argument, operand in zip(block.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(operand)
    *operations, returned = block.operations
    for operation in operations:
        _name_within(call, operation.operation)
        operation.operation.move_before(call)
    for result, value in zip(call.results, returned.operation.operands, strict=True):
        result.replace_all_uses_with(value)
    call.erase()
    function.erase()


def _copy(function: ir.Operation, call: ir.Operation) -> None:
    """Puts copies of a function's operations, which hold no others, in the place of a call."""
    (block,) = function.regions[0].blocks
    values = dict(zip(block.arguments, call.operands, strict=True))
    *operations, returned = (each.operation for each in block.operations)
    for operation in operations:
        copied = operation.clone(ip=ir.InsertionPoint(call))
        for i, operand in enumerate(operation.operands):
            copied.operands[i] = values[operand]
        values.update(zip(operation.results, copied.results, strict=True))
    for result, value in zip(call.results, returned.operands, strict=True):
        result.replace_all_uses_with(values[value])
    call.erase()


def _name_within(call: ir.Operation, operation: ir.Operation) -> None:
    """Puts the name of a call before the names of an operation and of those within it, as XLA does.

    Plans and reports find the layer of an operation by its name.
    """
    outer = call.location
    for each in operations_of(operation):
        inner = each.location
        if isinstance(outer, ir.NameLoc) and isinstance(inner, ir.NameLoc):
            name = f"{outer.name_str}/{inner.name_str}"
            each.location = ir.Location.name(name, inner.child_loc)
