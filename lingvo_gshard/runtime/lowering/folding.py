"""Lowers without TensorFlow's constant folding.

TensorFlow evaluates what depends on no input before it lowers a function for XLA, up to 10 MiB per
tensor. The counters of dropout, for example, then become literals of the global batch's size, and a
program grows with its devices. Without folding they stay iotas, which XLA's partitioner splits.

TensorFlow makes additional parameters of tensors that a function uses from outside. A program has
no inputs but its arguments, so the values of captured tensors become constants.

Before partitioning, XLA merges equal constants wherever they are used. A constant that a manual
region uses becomes manual, and a computation outside the region that shares it cannot be
partitioned: the process aborts with `Check failed: !IsManualLeaf()`. XLA does not merge constants
of different functions, and inlines functions only right before it partitions.

The partitioner cuts a gather or scatter of rows within rows without communication if the indices
are an iota over the rows. TensorFlow hides the iota by reshapes and broadcasts of a short one.
Indices that NumPy computed are constants.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.lazy import func, ir, mlir, pywrap_tfe
from lingvo_gshard.runtime.lowering.operations import (
    ENTERS_REGION,
    call_target,
    operations_of,
    shape_of,
)


def make_constants(module: ir.Module, values: Mapping[int, np.ndarray]) -> None:
    """Replaces parameters of the module's main function, given by their index, by constants."""
    main = ir.SymbolTable(module.operation)["main"]
    block = main.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block), main.location:
        for index, value in values.items():
            constant = mlir.ir_constant(np.asarray(value))
            block.arguments[index].replace_all_uses_with(constant)
    for index in sorted(values, reverse=True):
        block.erase_argument(index)
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    kept = [index for index in range(len(kind.inputs)) if index not in values]
    kind = ir.FunctionType.get([kind.inputs[index] for index in kept], kind.results)
    main.attributes["function_type"] = ir.TypeAttr.get(kind)
    if "arg_attrs" in main.attributes:
        of_arguments = list(ir.ArrayAttr(main.attributes["arg_attrs"]))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([of_arguments[index] for index in kept])


_CONSTANTS = ("stablehlo.constant", "stablehlo.iota")
# Operations whose bodies hold constants that can become calls. A reduction's body cannot.
_AROUND = ("func.func", "stablehlo.while", "stablehlo.case", "stablehlo.if")


def separate_constants(module: ir.Module) -> None:
    """Moves every constant into a function of its own, in a module with manual regions."""
    operations = operations_of(module)
    if not has_regions(operations):
        return
    constants = [
        each
        for each in operations
        if each.name in _CONSTANTS and (parent := each.parent) and parent.name in _AROUND
    ]
    for index, constant in enumerate(constants):
        _make_call(constant, f"constant_{index}", module)


def has_regions(operations: Sequence[ir.Operation]) -> bool:
    """Returns whether a module has manual regions, given all of its operations."""
    return any(call_target(operation) == ENTERS_REGION for operation in operations)


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


# Smaller constants stay as they are.
_MIN_CONSTANT_SIZE = 64
# Operations that move elements without computing.
_MOVES = (
    "stablehlo.reshape",
    "stablehlo.broadcast_in_dim",
    "stablehlo.transpose",
    "stablehlo.slice",
)
# TensorFlow writes a range as start + step * iota. Maps each operation to its neutral number.
_NEUTRAL = {"stablehlo.add": 0, "stablehlo.multiply": 1}


def make_iotas(module: ir.Module) -> None:
    """Replaces every int32 tensor that counts along one of its dimensions by an iota."""
    found: list[tuple[ir.Operation, int]] = []
    int32 = ir.IntegerType.get_signless(32, module.context)
    for operation in operations_of(module):
        if operation.name not in ("stablehlo.constant", *_MOVES):
            continue
        if ir.RankedTensorType(operation.results[0].type).element_type == int32:
            dimension = _counts_along(operation)
            if dimension is not None:
                found.append((operation, dimension))
    for operation, dimension in found:
        _replace(operation, dimension)


def _replace(operation: ir.Operation, dimension: int) -> None:
    with ir.InsertionPoint(operation), operation.location:
        along = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dimension)
        iota = ir.Operation.create(
            "stablehlo.iota",
            results=[operation.results[0].type],
            attributes={"iota_dimension": along},
        )
    operation.results[0].replace_all_uses_with(iota.results[0])


def _counts_along(operation: ir.Operation) -> int | None:
    """Returns the dimension along which the result's elements are their own indices, or None."""
    if operation.name == "stablehlo.iota":
        return ir.IntegerAttr(operation.attributes["iota_dimension"]).value
    if operation.name == "stablehlo.constant":
        return _constant_counts_along(operation)
    if operation.name in _NEUTRAL:
        number, other = operation.operands
        return _counts_of(other) if is_all(number, _NEUTRAL[operation.name]) else None
    if operation.name not in _MOVES:
        return None
    before = _counts_of(operation.operands[0])
    return None if before is None else _moved(operation, before)


def _counts_of(value: ir.Value) -> int | None:
    owner: Any = value.owner
    return None if isinstance(owner, ir.Block) else _counts_along(owner)


def _moved(operation: ir.Operation, before: int) -> int | None:
    """Returns where a dimension of the operand is in the result; None if it is not whole."""
    old, new = shape_of(operation.operands[0]), shape_of(operation.results[0])
    if operation.name == "stablehlo.slice":
        return before if old == new else None
    if operation.name == "stablehlo.transpose":
        return list(ir.DenseI64ArrayAttr(operation.attributes["permutation"])).index(before)
    if operation.name == "stablehlo.broadcast_in_dim":
        after = ir.DenseI64ArrayAttr(operation.attributes["broadcast_dimensions"])[before]
        return after if old[before] == new[after] else None
    # The rest is a reshape. Only one that adds and removes dimensions of size 1 keeps the iota.
    kept = [d for d, size in enumerate(old) if size != 1]
    if [old[d] for d in kept] != [size for size in new if size != 1] or before not in kept:
        return None
    return [d for d, size in enumerate(new) if size != 1][kept.index(before)]


def is_all(value: ir.Value, number: int) -> bool:
    """Returns whether every element equals `number`."""
    owner = value.owner
    while not isinstance(owner, ir.Block) and owner.name in _MOVES:
        owner = owner.operands[0].owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.constant":
        return False
    values = ir.DenseElementsAttr(owner.attributes["value"])
    splat: Any = values.get_splat_value() if values.is_splat else None
    return splat is not None and splat.value == number


def _constant_counts_along(operation: ir.Operation) -> int | None:
    values = ir.DenseElementsAttr(operation.attributes["value"])
    shape = shape_of(operation.results[0])
    if values.is_splat or np.prod(shape) < _MIN_CONSTANT_SIZE:
        return None
    array = np.array(values).reshape(shape)
    for dimension, size in enumerate(shape):
        along = [-1 if d == dimension else 1 for d in range(len(shape))]
        if (array == np.arange(size).reshape(along)).all():
            return dimension
    return None


_lock = threading.Lock()
# Number of threads inside `without_folding`, and the setting before the first one entered.
_inside = 0
_was_disabled = False


@contextlib.contextmanager
def without_folding() -> Iterator[None]:
    """Turns TensorFlow's constant folding for XLA off, for the process, inside the context."""
    global _inside, _was_disabled
    with _lock:
        if not _inside:
            _was_disabled = bool(pywrap_tfe.TF_GetXlaConstantFoldingDisabled())
            pywrap_tfe.TF_SetXlaConstantFoldingDisabled(True)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                pywrap_tfe.TF_SetXlaConstantFoldingDisabled(_was_disabled)
