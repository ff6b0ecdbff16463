"""Builders of StableHLO operations, which are made at the current insertion point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lingvo_gshard.core.lazy import ir, stablehlo
from lingvo_gshard.runtime import annotated, annotation_of, is_all, maker_of, shape_of
from lingvo_gshard.sharding import Mesh, Split
from lingvo_gshard.wings.spmd_passes.sharding_text import text_of_split

Axes = tuple[str, ...]


def type_like(value: ir.Value, shape: Sequence[int]) -> ir.Type:
    """Returns the type of a tensor of this shape with a value's elements."""
    return ir.RankedTensorType.get(list(shape), ir.RankedTensorType(value.type).element_type)


def constant(number: float, kind: ir.Type) -> ir.Value:
    """Returns a tensor of this type whose elements are all `number`."""
    element = ir.FloatAttr.get(ir.RankedTensorType(kind).element_type, number)
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(kind, element))


def summed(value: ir.Value, dimensions: Iterable[int]) -> ir.Value:
    """Returns the sum over dimensions."""
    gone = list(dimensions)
    kept = [size for i, size in enumerate(shape_of(value)) if i not in gone]
    scalar = type_like(value, [])
    zero = constant(0.0, scalar)
    reduction = stablehlo.ReduceOp([type_like(value, kept)], [value], [zero], gone)
    block = ir.Block.create_at_start(reduction.body, [scalar, scalar])
    with ir.InsertionPoint(block):
        stablehlo.return_([stablehlo.add(*block.arguments)])
    return reduction.results[0]


def reshaped(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Returns the value in another shape."""
    if list(shape) == shape_of(value):
        return value
    return stablehlo.reshape(type_like(value, shape), value)


def transposed(value: ir.Value, order: Sequence[int]) -> ir.Value:
    """Returns the value with its dimensions in another order."""
    if list(order) == sorted(order):
        return value
    return stablehlo.transpose(value, list(order))


def sliced(value: ir.Value, slices: Sequence[range]) -> ir.Value:
    """Returns the elements at these places of each dimension."""
    places = [(each.start, each.stop, each.step) for each in slices]
    return stablehlo.slice(value, *map(list, zip(*places, strict=True)))


def erase_unused(operations: Iterable[ir.Operation]) -> list[ir.Operation]:
    """Erases operations without uses until no more are left, and returns those with uses.

    An erased operation no longer uses its operands, so that their makers may be erased next.
    """
    waiting = list(dict.fromkeys(operations))
    while True:
        used = [each for each in waiting if any(list(result.uses) for result in each.results)]
        for each in waiting:
            if each not in used:
                each.erase()
        if len(used) == len(waiting):
            return used
        waiting = used


def split_over(value: ir.Value, split: Split, mesh: Mesh) -> ir.Value:
    """Returns the value with the annotation of a split."""
    return annotated(value, text_of_split(split, mesh))


def with_first(axes: Axes, split: Split) -> Split:
    """Returns the split of partial sums from the split of their sum."""
    rest = (tuple(axis for axis in each if axis not in axes) for each in split)
    return (axes, *rest)


def is_float(value: ir.Value) -> bool:
    """Returns whether a value is a tensor of floating-point numbers."""
    kind = value.type
    return isinstance(kind, ir.RankedTensorType) and isinstance(kind.element_type, ir.FloatType)


def is_zero(value: ir.Value) -> bool:
    """Returns whether every element is 0, perhaps as a number of another type, or annotated."""
    maker = maker_of(value)
    while maker is not None and (maker.name == "stablehlo.convert" or annotation_of(maker)):
        value = maker.operands[0]
        maker = maker_of(value)
    return is_all(value, 0)
