"""Rewrites counters as iotas, and small tables so that each device computes them whole.

The partitioner cuts a gather or scatter of rows within rows without communication if the indices
are an iota over the rows. TensorFlow hides the iota by reshapes and broadcasts of a short one.
Indices that NumPy computed are constants.

A table such as [1,L,M] is broadcast to [B,L,M]. XLA's partitioner may cut its first dimension as it
cuts B: one device then computes the table, and the others receive it. An annotation keeps it whole.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lingvo_gshard.core.lazy import ir
from lingvo_gshard.runtime.lowering.annotations import (
    CUSTOM_CALL,
    ENTERS_REGION,
    annotated,
    call_target,
)

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

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name in ("stablehlo.constant", *_MOVES) and _is_int32(operation.results[0]):
            dimension = _counts_along(operation)
            if dimension is not None:
                found.append((operation, dimension))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
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
    old, new = _shape(operation.operands[0]), _shape(operation.results[0])
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
    return values.is_splat and np.array(values).flat[0] == number


def _constant_counts_along(operation: ir.Operation) -> int | None:
    values = ir.DenseElementsAttr(operation.attributes["value"])
    shape = _shape(operation.results[0])
    if values.is_splat or np.prod(shape) < _MIN_CONSTANT_SIZE:
        return None
    array = np.array(values).reshape(shape)
    for dimension, size in enumerate(shape):
        along = [-1 if d == dimension else 1 for d in range(len(shape))]
        if (array == np.arange(size).reshape(along)).all():
            return dimension
    return None


def _is_int32(value: ir.Value) -> bool:
    return ir.RankedTensorType(value.type).element_type == ir.IntegerType.get_signless(32)


def _shape(value: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


# Larger tables may be split, as the tensors that they are broadcast to. TensorFlow's optimizer
# computes constants up to this size when it folds them.
_LARGEST_BYTES = 10 * 2**20
_BROADCAST = "stablehlo.broadcast_in_dim"
# They have no operands, but a device has them whatever their split.
_SOURCES = ("stablehlo.constant", "stablehlo.iota")


def keep_tables_whole(module: ir.Module) -> None:
    """Annotates the small operands of broadcasts that depend on no input as replicated.

    A program with manual regions stays as it is: what a region computes is split by hand.
    """
    closed: set[ir.Value] = set()
    tables: list[ir.Operation] = []
    has_regions = False

    def visit(operation: ir.Operation) -> ir.WalkResult:
        nonlocal has_regions
        has_regions |= call_target(operation) == ENTERS_REGION
        is_plain = not operation.regions and operation.name != CUSTOM_CALL
        if is_plain and len(operation.results) == 1 and closed.issuperset(operation.operands):
            if operation.operands or operation.name in _SOURCES:
                closed.add(operation.results[0])
                if _broadcasts_table(operation):
                    tables.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for operation in () if has_regions else tables:
        with ir.InsertionPoint(operation), operation.location:
            operation.operands[0] = annotated(operation.operands[0], "{replicated}")


def _broadcasts_table(operation: ir.Operation) -> bool:
    """Returns whether an operation repeats a table that is computed, and not large."""
    if operation.name != _BROADCAST:
        return False
    table, result = (ir.RankedTensorType(v.type) for v in (operation.operands[0], operation.result))
    is_computed = operation.operands[0].owner.name not in _SOURCES
    size = math.prod(table.shape)
    return is_computed and 1 < size < math.prod(result.shape) and 4 * size <= _LARGEST_BYTES
