"""Keeps tables that are broadcast whole on every device.

A table such as [1,L,M] is broadcast to [B,L,M]. XLA's partitioner may cut the first dimension of
the table as it cuts B. One device then computes the table and sends it to the other devices. An
annotation keeps the table whole.
"""

from __future__ import annotations

import math

from lingvo_gshard.core.lazy import ir
from lingvo_gshard.runtime import CUSTOM_CALL, annotated, has_regions, operations_of
from lingvo_gshard.sharding import Mesh

# Larger tables may be split, as the tensors that they are broadcast to. TensorFlow's optimizer
# computes constants up to this size when it folds them.
_LARGEST_BYTES = 10 * 2**20
_BROADCAST = "stablehlo.broadcast_in_dim"
# They have no operands, but a device has them whatever their split.
_SOURCES = ("stablehlo.constant", "stablehlo.iota")


def keep_tables_whole(module: ir.Module, mesh: Mesh) -> None:
    """Annotates the small operands of broadcasts that depend on no input as replicated.

    A program with manual regions stays as it is: what a region computes is split by hand.
    """
    operations = operations_of(module)
    if mesh.size == 1 or has_regions(operations):
        return
    closed: set[ir.Value] = set()
    tables: list[ir.Operation] = []
    for operation in operations:
        is_plain = not operation.regions and operation.name != CUSTOM_CALL
        if is_plain and len(operation.results) == 1 and closed.issuperset(operation.operands):
            if operation.operands or operation.name in _SOURCES:
                closed.add(operation.results[0])
                if _broadcasts_table(operation):
                    tables.append(operation)
    for operation in tables:
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
