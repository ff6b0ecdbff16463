"""Sums over devices whose results are split over the same devices, in unequal shards.

A gradient is a product over rows that are split over devices, and its optimizer may hold a part of
it on each of these devices. XLA then adds up the products of all devices and gives each device its
part by one reduce-scatter, if the parts are equal. If the dimension does not divide by the number
of devices, XLA gives every device the whole sum, which is twice the communication.

This module writes the partial sums out (see partial_operations.py), and pads them with zeros to a
size that divides before they are added up. The padding is cut off again; the shards of both sizes
have the same elements, so cutting moves none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core.lazy import ir, stablehlo
from lingvo_gshard.runtime import annotation_of, maker_of, operations_of, shape_of
from lingvo_gshard.sharding import Mesh, Split
from lingvo_gshard.wings.spmd_passes import builders, partial_operations
from lingvo_gshard.wings.spmd_passes.value_splits import ValueSplits


def reduce_to_uneven_parts(module: ir.Module, mesh: Mesh) -> None:
    """Rewrites sums over devices that are split over these devices along an uneven dimension."""
    if mesh.size == 1:
        return
    splits = ValueSplits(mesh)
    annotations = [each for each in operations_of(module) if annotation_of(each)]
    found = list(filter(None, (_uneven_sum(each, splits, mesh) for each in annotations)))
    for each in found:
        each.rewrite(mesh)
    builders.erase_unused(
        [operation for each in found for operation in (*each.movers, each.product)]
    )


@dataclasses.dataclass(frozen=True)
class _UnevenSum:
    """A product that is summed over devices, moved, and split along an uneven dimension."""

    annotation: ir.Operation
    movers: tuple[ir.Operation, ...]
    product: ir.Operation
    partial: partial_operations.Partial
    dimension: int
    split: Split

    def rewrite(self, mesh: Mesh) -> None:
        """Makes the annotation split a sum of padded terms, without the padding."""
        result = self.annotation.results[0]
        shape, axes = shape_of(result), self.partial.axes
        parts = mesh.parts(axes)
        padded = list(shape)
        padded[self.dimension] = -(-shape[self.dimension] // parts) * parts
        with ir.InsertionPoint(self.annotation), self.annotation.location:
            terms = partial_operations.moved(self.partial.build(), self.movers, axes, mesh)
            terms = builders.split_over(
                _padded(terms, [parts, *padded]), builders.with_first(axes, self.split), mesh
            )
            total = builders.split_over(builders.summed(terms, [0]), self.split, mesh)
            self.annotation.operands[0] = builders.sliced(total, list(map(range, shape)))


def _uneven_sum(annotation: ir.Operation, splits: ValueSplits, mesh: Mesh) -> _UnevenSum | None:
    result = annotation.results[0]
    split = splits.of(result) if isinstance(result.type, ir.RankedTensorType) else None
    if split is None:
        return None
    sizes = zip(shape_of(result), split, strict=True)
    dimensions = [i for i, (size, axes) in enumerate(sizes) if size % mesh.parts(axes)]
    if len(dimensions) != 1:
        return None
    (uneven,) = dimensions
    movers: list[ir.Operation] = []
    maker = maker_of(annotation.operands[0])
    while maker and (partial_operations.passes(maker) or maker.name == partial_operations.SLICE):
        movers.insert(0, maker)
        maker = maker_of(maker.operands[0])
    if maker is None or maker.block != annotation.block:
        return None
    others = tuple(axes for i, axes in enumerate(split) if i != uneven)
    partial = partial_operations.partial_of(maker, splits, mesh, others)
    if partial is None or partial.axes != split[uneven]:
        return None
    return _UnevenSum(annotation, tuple(movers), maker, partial, uneven, split)


def _padded(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Returns a value with zeros after its last elements."""
    nothing = [0] * len(shape)
    added = [new - old for old, new in zip(shape_of(value), shape, strict=True)]
    return stablehlo.pad(
        value, builders.constant(0.0, builders.type_like(value, [])), nothing, added, nothing
    )
