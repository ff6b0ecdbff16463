"""Keeps dimensions whole along which XLA's partitioner computes wrong values.

The partitioner splits some operations along dimensions that it cannot split, as of jaxlib 0.10.2.
The values are then wrong, or the compiler fails. Each rule here is a case that random splits found:

- Convolutions: after an exchange of halos, `convolution_handler.cc` of XLA's SPMD partitioner sums
  over all devices, also over those that hold copies. A result is multiplied by the size of each
  mesh axis that splits nothing. The gradient of a grouped filter takes this path whenever rows are
  split. Features of grouped convolutions are also cut between groups.
- Gradients of max pooling (`select_and_scatter`), whose windows are cut.
- Padding between elements, which is the gradient of a slice with strides and of average pooling.
- Scatters of rows whose number does not divide by the devices that split them, if an axis of the
  mesh splits nothing. What pads the rows is then scattered, too.

Annotations keep these dimensions whole, and leave the split of others to the partitioner. The rows
of a grouped filter's gradient are split over all devices, so that no device holds a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.core.lazy import ir, stablehlo
from lingvo_gshard.runtime import (
    ENTERS_REGION,
    LEAVES_REGION,
    annotated,
    call_target,
    operations_of,
    shape_of,
)
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.spmd_passes.builders import split_over
from lingvo_gshard.wings.spmd_passes.value_splits import ValueSplits


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The dimensions to keep whole, for each operand and for the result.

    Attributes:
      operands: for each operand its whole dimensions; the rest is open.
      rows: for each operand, a dimension to split over all devices; all others are whole.
    """

    operands: Sequence[Sequence[int]] = ()
    result: Sequence[int] = ()
    rows: Sequence[int] = ()


def keep_whole(module: ir.Module, mesh: Mesh) -> None:
    """Annotates the operands and results of operations that XLA cannot split along any dimension.

    Operations inside manual regions stay as they are: their operands are parts of tensors.
    """
    if mesh.size == 1:
        return
    found = [each for each in operations_of(module) if each.name in _RULES]
    manual = _inside_regions(module) if found else set()
    splits = ValueSplits(mesh)
    for operation in found:
        if manual.isdisjoint(operation.operands):
            _annotate(operation, _RULES[operation.name](operation, splits, mesh), splits, mesh)


def _annotate(operation: ir.Operation, kept: _Kept, splits: ValueSplits, mesh: Mesh) -> None:
    with ir.InsertionPoint(operation), operation.location:
        for index, dimensions in enumerate(kept.operands):
            operation.operands[index] = _kept_whole(operation.operands[index], dimensions)
        for index, row in enumerate(kept.rows):
            operation.operands[index] = _over_all(operation.operands[index], row, splits, mesh)
    if not kept.result:
        return
    result = operation.results[0]
    uses = [(use.owner, use.operand_number) for use in result.uses]
    with ir.InsertionPoint.after(operation), operation.location:
        whole = _kept_whole(result, kept.result)
    for owner, number in uses:
        owner.operands[number] = whole


def _kept_whole(value: ir.Value, dimensions: Sequence[int]) -> ir.Value:
    """Returns a value whose annotation keeps dimensions whole and leaves the others open."""
    whole = set(dimensions)
    if not whole:
        return value
    return annotated(value, "{replicated}", sorted({*range(len(shape_of(value)))} - whole))


def _over_all(value: ir.Value, row: int, splits: ValueSplits, mesh: Mesh) -> ir.Value:
    """Returns a value with one dimension split over all devices.

    Axes that are known to split the dimension come first: the others then cut what each device has.
    """
    split = splits.of(value)
    first = split[row] if split else ()
    axes = (*first, *(axis for axis in mesh.names if axis not in first))
    rank = len(shape_of(value))
    return split_over(value, tuple(axes if i == row else () for i in range(rank)), mesh)


def _of_convolution(operation: ir.Operation, splits: ValueSplits, mesh: Mesh) -> _Kept:
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    if _count(operation, "batch_group_count") > 1:
        rows = (numbers.input_feature_dimension, numbers.kernel_input_feature_dimension)
        return _Kept(rows=rows, result=range(len(shape_of(operation.results[0]))))
    inputs, kernel, output = (
        numbers.input_spatial_dimensions,
        numbers.kernel_spatial_dimensions,
        numbers.output_spatial_dimensions,
    )
    if _count(operation, "feature_group_count") > 1:
        return _Kept(
            (
                [*inputs, numbers.input_feature_dimension],
                range(len(shape_of(operation.operands[1]))),
            ),
            [*output, numbers.output_feature_dimension],
        )
    dilations = ir.DenseI64ArrayAttr(operation.attributes["lhs_dilation"])
    if max(dilations, default=1) == 1 and not _has_several_axes(mesh):
        return _Kept()
    return _Kept((inputs, kernel), output)


def _of_pooling(operation: ir.Operation, splits: ValueSplits, mesh: Mesh) -> _Kept:
    attributes = (operation.attributes[name] for name in ("window_dimensions", "window_strides"))
    sizes = zip(*map(ir.DenseI64ArrayAttr, attributes), strict=True)
    windows = [dimension for dimension, size in enumerate(sizes) if max(size) > 1]
    return _Kept((windows, windows), windows)


def _of_padding(operation: ir.Operation, splits: ValueSplits, mesh: Mesh) -> _Kept:
    between = ir.DenseI64ArrayAttr(operation.attributes["interior_padding"])
    stretched = [dimension for dimension, count in enumerate(between) if count]
    return _Kept((stretched,), stretched)


def _of_scatter(operation: ir.Operation, splits: ValueSplits, mesh: Mesh) -> _Kept:
    if not _has_several_axes(mesh) or len(operation.operands) != 3:
        return _Kept()
    numbers = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    _, indices, updates = operation.operands
    sizes, split = shape_of(updates), splits.of(updates)
    rows = [i for i in range(len(sizes)) if i not in numbers.update_window_dims]
    places = [i for i in range(len(shape_of(indices))) if i != numbers.index_vector_dim]
    uneven = [
        (row, place)
        for row, place in zip(rows, places, strict=True)
        if sizes[row] % (mesh.parts(split[row]) if split else mesh.size)
    ]
    return _Kept(((), [place for _, place in uneven], [row for row, _ in uneven]))


_RULES: dict[str, Callable[[ir.Operation, ValueSplits, Mesh], _Kept]] = {
    "stablehlo.convolution": _of_convolution,
    "stablehlo.select_and_scatter": _of_pooling,
    "stablehlo.pad": _of_padding,
    "stablehlo.scatter": _of_scatter,
}


def _has_several_axes(mesh: Mesh) -> bool:
    return sum(size > 1 for _, size in mesh.axes) > 1


def _count(operation: ir.Operation, name: str) -> int:
    return ir.IntegerAttr(operation.attributes[name]).value


def _inside_regions(module: ir.Module) -> set[ir.Value]:
    functions = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in module.body.operations}
    entries = [each for each in operations_of(module) if call_target(each) == ENTERS_REGION]
    waiting: list[ir.Value] = [result for each in entries for result in each.results]
    inside: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        if value in inside:
            continue
        inside.add(value)
        for use in value.uses:
            user = use.owner.operation
            if call_target(user) == LEAVES_REGION:
                continue
            waiting += user.results
            bodies = list(user.regions)
            if user.name == "func.call":
                callee = ir.FlatSymbolRefAttr(user.attributes["callee"]).value
                bodies += functions[callee].regions
            waiting += [argument for body in bodies for argument in body.blocks[0].arguments]
    return inside
