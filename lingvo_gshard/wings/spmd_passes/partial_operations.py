"""Operations on partial sums, which have a first dimension that is split over the devices.

A product over a split dimension leaves each device with a partial sum, and XLA's partitioner adds
the partial sums up over the devices at once. A program may add several such products, for example
the gradients of a tensor that is used several times. XLA then reduces each product separately.
XLA's AllReduceReassociate merges the reductions after partitioning, but not in every compiler, and
not across other operations.

This module writes the partial sums out. A product over a dimension that is split over n devices
becomes n products, with a first dimension that is split over these devices, one on each. The
program adds the products of all terms and then sums over the first dimension. That takes one
all-reduce, or one reduce-scatter.

Let a summed dimension of n m elements be split n times. It is cut into a dimension of n, which
stays split, and a dimension of m, which each device sums up. A `Partial` computes an operation with
the dimension of n first in the result. The dimensions of n of one operation are merged.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lingvo_gshard.core.lazy import ir, stablehlo
from lingvo_gshard.runtime import annotated, annotation_of, maker_of, operations_of, shape_of
from lingvo_gshard.sharding import Mesh, Split
from lingvo_gshard.wings.spmd_passes.builders import (
    Axes,
    constant,
    erase_unused,
    is_float,
    is_zero,
    reshaped,
    sliced,
    split_over,
    summed,
    transposed,
    type_like,
    with_first,
)
from lingvo_gshard.wings.spmd_passes.value_splits import ValueSplits

SLICE = "stablehlo.slice"
# Operations that may stand between a partial sum and an addition.
_MOVES = ("stablehlo.transpose", "stablehlo.reshape")


@dataclasses.dataclass(frozen=True)
class Partial:
    """A way to compute the result of an operation as partial sums.

    Attributes:
      axes: the mesh axes that split the first dimension, major first.
      build: returns the partial sums, computed where the operation is.
    """

    axes: Axes
    build: Callable[[], ir.Value]


def partial_of(
    operation: ir.Operation, splits: ValueSplits, mesh: Mesh, kept: Split = ()
) -> Partial | None:
    """Returns how an operation can be computed as partial sums; None if it sums over no split.

    Args:
      operation: a product, a reduction by addition, or a scatter that adds to zeros.
      kept: the split of the result's own dimensions, if it is known. Nothing is summed over its
        axes.
    """
    known = _KINDS.get(operation.name)
    claimed = frozenset(axis for axes in kept for axis in axes)
    return known(_Source(operation, splits, mesh, claimed)) if known else None


def passes(operation: ir.Operation) -> bool:
    """Returns whether an operation only moves or annotates the elements of a partial sum."""
    if operation.name == "stablehlo.convert":
        return operation.operands[0].type == operation.results[0].type
    return operation.name in _MOVES or bool(annotation_of(operation))


def moved(
    value: ir.Value, movers: Sequence[ir.Operation], axes: Axes = (), mesh: Mesh | None = None
) -> ir.Value:
    """Returns a value after slices, and operations that only move or annotate (see `passes`).

    `axes` split the first dimension of partial sums; other values have none.
    """
    first = 1 if axes else 0
    for mover in movers:
        lead = shape_of(value)[:first]
        if text := annotation_of(mover):
            split = mesh and ValueSplits(mesh).of(mover.results[0])
            if split and mesh:
                value = split_over(value, with_first(axes, split), mesh)
            elif not axes:
                value = annotated(value, text)
        elif mover.name == "stablehlo.reshape":
            value = reshaped(value, [*lead, *shape_of(mover.results[0])])
        elif mover.name == "stablehlo.transpose":
            order = ir.DenseI64ArrayAttr(mover.attributes["permutation"])
            value = transposed(value, [*range(first), *(first + i for i in order)])
        elif mover.name == SLICE:
            value = sliced(value, [*map(range, lead), *_slices(mover)])
    return value


def _slices(operation: ir.Operation) -> Iterator[range]:
    """Yields the places of each dimension that a slice takes."""
    names = ("start_indices", "limit_indices", "strides")
    parts = (ir.DenseI64ArrayAttr(operation.attributes[name]) for name in names)
    return itertools.starmap(range, zip(*parts, strict=True))


@dataclasses.dataclass(frozen=True)
class _Source:
    """An operation whose operands are cut along split dimensions, except by `claimed` mesh axes."""

    operation: ir.Operation
    splits: ValueSplits
    mesh: Mesh
    claimed: frozenset[str] = frozenset()

    def shared_axes(self, places: Sequence[tuple[int, int]]) -> list[Axes]:
        """Returns the mesh axes of dimensions that several operands have."""
        found = set()
        for operand, dimension in places:
            split = self.splits.of(self.operation.operands[operand])
            if split is not None:
                found.add(tuple(axis for axis in split[dimension] if axis not in self.claimed))
        return list(found)

    def agreed(self, dimensions: Sequence[Sequence[tuple[int, int]]]) -> list[Axes] | None:
        """Returns the mesh axes of each summed dimension; None if none is summed over devices."""
        agreed: list[Axes] = []
        for places in dimensions:
            found = self.shared_axes(places)
            axes = found[0] if len(found) == 1 else ()
            operand, dimension = places[0]
            size = shape_of(self.operation.operands[operand])[dimension]
            agreed.append(axes if size % self.mesh.parts(axes) == 0 else ())
        used = [axis for axes in agreed for axis in axes]
        return agreed if used and len(set(used)) == len(used) else None

    def is_known(self, summed_over: Axes) -> bool:
        """Returns whether it is known how axes beside the summed ones split the result.

        Partial sums are annotated. As unsplit ones, every device would compute them whole.
        """
        others = {axis for axis, size in self.mesh.axes if size > 1} - {*summed_over}
        return not others or self.splits.of(self.operation.results[0]) is not None

    def cut(
        self, operand: int, dimensions: Sequence[int], agreed: Sequence[Axes]
    ) -> tuple[ir.Value, list[int], list[int]]:
        """Returns an operand whose summed dimensions are cut along their agreed mesh axes.

        Other dimensions lose the axes of summed dimensions and of earlier dimensions of the result:
        devices need these dimensions whole.

        Returns:
          the operand; the places of the first parts of cut dimensions; and the place of each
          dimension, or of the rest of it.
        """
        value = self.operation.operands[operand]
        split, shape = self.splits.of(value), shape_of(value)
        cuts = {d: axes for d, axes in zip(dimensions, agreed, strict=True) if axes}
        if split is not None:
            split = tuple(cuts.get(d, axes) for d, axes in enumerate(self._kept(operand, split)))
            value = split_over(value, split, self.mesh)
        sizes: list[int] = []
        places: dict[int, int] = {}
        left: list[int] = []
        for dimension, size in enumerate(shape):
            if dimension in cuts:
                places[dimension] = len(sizes)
                sizes.append(self.mesh.parts(cuts[dimension]))
                size //= sizes[-1]
            left.append(len(sizes))
            sizes.append(size)
        value = reshaped(value, sizes)
        if split is not None:
            after: list[Axes] = [()] * len(sizes)
            for dimension, axes in enumerate(split):
                after[places.get(dimension, left[dimension])] = axes
            value = split_over(value, tuple(after), self.mesh)
        return value, [places[dimension] for dimension in cuts], left

    def _kept(self, operand: int, split: Split) -> Split:
        """Returns the split of an operand without axes that other dimensions of a product claim."""
        if operand == 0 or self.operation.name != "stablehlo.dot_general":
            return split
        other = self.splits.of(self.operation.operands[1 - operand]) or ()
        numbers = stablehlo.DotDimensionNumbers(self.operation.attributes[_NUMBERS])
        shared = [*numbers.rhs_batching_dimensions, *numbers.rhs_contracting_dimensions]
        claimed = {axis for axes in other for axis in axes}
        return tuple(
            axes if i in shared else tuple(axis for axis in axes if axis not in claimed)
            for i, axes in enumerate(split)
        )

    def merged(self, value: ir.Value, agreed: Sequence[Axes], split: Split | None) -> ir.Value:
        """Returns partial sums with one first dimension."""
        axes = _flat(agreed)
        count = sum(map(bool, agreed))
        if split is not None and count > 1:
            first = [each for each in agreed if each]
            rest = with_first(axes, split)[1:]
            value = split_over(value, (*first, *rest), self.mesh)
        value = reshaped(value, [self.mesh.parts(axes), *shape_of(value)[count:]])
        return value if split is None else split_over(value, with_first(axes, split), self.mesh)

    def other_attributes(self, *names: str) -> dict[str, ir.Attribute]:
        """Returns the operation's attributes without some of them."""
        attributes = self.operation.attributes
        return {name: attributes[name] for name in attributes if name not in names}


_NUMBERS = "dot_dimension_numbers"


def _of_product(source: _Source) -> Partial | None:
    numbers = stablehlo.DotDimensionNumbers(source.operation.attributes[_NUMBERS])
    contracted = sorted(
        zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True)
    )
    agreed = source.agreed([[(0, i), (1, j)] for i, j in contracted])
    if agreed is None or not source.is_known(_flat(agreed)):
        return None

    def build() -> ir.Value:
        with ir.InsertionPoint(source.operation), source.operation.location:
            left, left_first, left_rest = source.cut(0, [i for i, _ in contracted], agreed)
            right, right_first, right_rest = source.cut(1, [j for _, j in contracted], agreed)
            attributes = source.other_attributes(_NUMBERS)
            attributes[_NUMBERS] = stablehlo.DotDimensionNumbers.get(
                [*left_first, *(left_rest[i] for i in numbers.lhs_batching_dimensions)],
                [*right_first, *(right_rest[i] for i in numbers.rhs_batching_dimensions)],
                [left_rest[i] for i, _ in contracted],
                [right_rest[j] for _, j in contracted],
            )
            product = ir.Operation.create(
                "stablehlo.dot_general",
                results=[_with_first_sizes(source, agreed)],
                operands=[left, right],
                attributes=attributes,
            ).results[0]
            return source.merged(product, agreed, source.splits.of(source.operation.results[0]))

    return Partial(_flat(agreed), build)


def _of_reduction(source: _Source) -> Partial | None:
    operation = source.operation
    if len(operation.operands) != 2 or not _adds(operation) or not is_zero(operation.operands[1]):
        return None
    summed_over = list(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))
    agreed = source.agreed([[(0, i)] for i in summed_over])
    if agreed is None:
        return None

    def build() -> ir.Value:
        with ir.InsertionPoint(operation), operation.location:
            value, first, rest = source.cut(0, summed_over, agreed)
            gone = {rest[i] for i in summed_over}
            kept = [i for i in rest if i not in gone]
            value = transposed(value, [*first, *kept, *sorted(gone)])
            value = summed(value, range(len(first) + len(kept), len(rest) + len(first)))
            split = source.splits.of(operation.operands[0])
            whole = split and tuple(a for i, a in enumerate(split) if i not in summed_over)
            return source.merged(value, agreed, whole)

    return Partial(_flat(agreed), build)


_PLACES = "scatter_dimension_numbers"


def _of_scatter(source: _Source) -> Partial | None:
    operation = source.operation
    if len(operation.operands) != 3 or not _adds(operation) or not is_zero(operation.operands[0]):
        return None
    numbers = stablehlo.ScatterDimensionNumbers(operation.attributes[_PLACES])
    indices, updates = (shape_of(operation.operands[i]) for i in (1, 2))
    vector = numbers.index_vector_dim
    rows = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
    if numbers.input_batching_dims or vector < len(rows):
        return None
    agreed = source.agreed([[(2, i), (1, n)] for n, i in enumerate(rows)])
    if agreed is None:
        return None

    def build() -> ir.Value:
        with ir.InsertionPoint(operation), operation.location:
            index, places, rest = source.cut(1, range(len(rows)), agreed)
            index = transposed(index, [*places, *rest])
            if vector == len(indices):
                index = reshaped(index, [*shape_of(index), 1])
            first = len(places)
            index = _numbered(index, first)
            update, places, rest = source.cut(2, rows, agreed)
            update = transposed(update, [*places, *rest])
            into = _with_first_sizes(source, agreed)
            attributes = source.other_attributes(_PLACES)
            attributes[_PLACES] = stablehlo.ScatterDimensionNumbers.get(
                [i + first for i in numbers.update_window_dims],
                [*range(first), *(i + first for i in numbers.inserted_window_dims)],
                [],
                [],
                [*range(first), *(i + first for i in numbers.scattered_dims_to_operand_dims)],
                first + len(rows),
            )
            zeros = constant(0.0, into)
            scatter = ir.Operation.create(
                "stablehlo.scatter",
                results=[into],
                operands=[zeros, index, update],
                attributes=attributes,
                regions=1,
            )
            operation.regions[0].blocks[0].append_to(scatter.regions[0])
            return source.merged(scatter.results[0], agreed, None)

    return Partial(_flat(agreed), build)


_KINDS = {
    "stablehlo.dot_general": _of_product,
    "stablehlo.reduce": _of_reduction,
    "stablehlo.scatter": _of_scatter,
}


def _numbered(index: ir.Value, first: int) -> ir.Value:
    """Returns indices preceded by their numbers along the first dimensions.

    The partitioner recognizes the iotas, and leaves each device the rows of its own number.
    """
    kind = type_like(index, [*shape_of(index)[:-1], 1])
    numbers = [stablehlo.iota(kind, dimension) for dimension in range(first)]
    return stablehlo.concatenate([*numbers, index], len(shape_of(index)) - 1)


def _adds(operation: ir.Operation) -> bool:
    """Whether the body of a reduction or scatter is an addition."""
    body = list(operation.regions[0].blocks[0].operations)
    return [each.operation.name for each in body] == ["stablehlo.add", "stablehlo.return"]


def _with_first_sizes(source: _Source, agreed: Sequence[Axes]) -> ir.Type:
    """Returns the type of an operation's result with a first dimension for each cut one."""
    result = source.operation.results[0]
    sizes = [source.mesh.parts(axes) for axes in agreed if axes]
    return type_like(result, [*sizes, *shape_of(result)])


def _flat(agreed: Sequence[Axes]) -> Axes:
    return tuple(axis for axes in agreed for axis in axes)


_ADD = "stablehlo.add"


@dataclasses.dataclass(frozen=True)
class _Term:
    """A term of a sum: a value, the movers before it is added, and perhaps its partial sums."""

    value: ir.Value
    movers: tuple[ir.Operation, ...]
    partial: Partial | None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the partial sums are split over; () without partial sums."""
        return self.partial.axes if self.partial else ()


def add_before_reducing(module: ir.Module, mesh: Mesh) -> None:
    """Rewrites sums of several terms that each need a reduction over the same mesh axes."""
    if mesh.size == 1:
        return
    sums = [x for x in operations_of(module) if x.name == _ADD and is_float(x.results[0])]
    _Rewriting(mesh).rewrite(sums)


class _Rewriting:
    """The rewriting of one module."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._splits = ValueSplits(mesh)
        self._replaced: list[ir.Operation] = []
        self._inner: set[ir.Operation] = set()

    def rewrite(self, sums: Sequence[ir.Operation]) -> None:
        """Rewrites sums, given in the order of the program."""
        for operation in reversed(sums):
            if operation not in self._inner:
                self._rewrite(operation)
        # Erases replaced operations at the end: the cache of splits has their results as keys.
        erase_unused(self._replaced)

    def _rewrite(self, root: ir.Operation) -> None:
        terms, passed = self._terms(root)
        by_axes = collections.defaultdict(list)
        for term in terms:
            by_axes[term.axes].append(term)
        shared = {axes for axes, group in by_axes.items() if axes and len(group) > 1}
        if not shared:
            return
        with ir.InsertionPoint(root), root.location:
            total = None
            for axes, group in by_axes.items():
                if axes in shared:
                    values = [self._reduced(group, axes)]
                else:
                    values = [moved(term.value, term.movers) for term in group]
                for value in values:
                    total = value if total is None else stablehlo.add(total, value)
        root.results[0].replace_all_uses_with(total)
        self._replaced += passed

    def _terms(self, root: ir.Operation) -> tuple[list[_Term], list[ir.Operation]]:
        """Returns the terms of a sum, and the operations between them and the sum, last first.

        The inner sums, whose results are used nowhere else, belong to the outermost one.
        """
        terms, passed = [], [root]
        waiting = [(operand, ()) for operand in reversed(root.operands)]
        while waiting:
            value, movers = waiting.pop()
            start, between = (value, movers), []
            maker = _own_maker(value, root)
            while maker and passes(maker):
                movers, between = (maker, *movers), [*between, maker]
                value = maker.operands[0]
                maker = _own_maker(value, root)
            partial = maker and partial_of(maker, self._splits, self._mesh)
            if maker and maker.name == _ADD:
                self._inner.add(maker)
                passed += [*between, maker]
                waiting += [(operand, movers) for operand in reversed(maker.operands)]
            elif partial:
                passed += [*between, maker]
                terms.append(_Term(value, movers, partial))
            else:
                terms.append(_Term(*start, None))
        return terms, passed

    def _reduced(self, terms: Sequence[_Term], axes: tuple[str, ...]) -> ir.Value:
        """Returns the sum of terms, reduced over mesh axes once."""
        total: Any = None
        annotation = None
        for term in terms:
            assert term.partial is not None
            value = moved(term.partial.build(), term.movers, axes, self._mesh)
            total = value if total is None else stablehlo.add(total, value)
            if term.movers and annotation_of(term.movers[-1]):
                annotation = term.movers[-1]
        reduced = summed(total, [0])
        return reduced if annotation is None else moved(reduced, [annotation])


def _own_maker(value: ir.Value, root: ir.Operation) -> ir.Operation | None:
    """Returns the operation that computes a value beside a sum; None if it is used elsewhere."""
    maker = maker_of(value)
    if maker is None or len(list(value.uses)) != 1 or maker.block != root.block:
        return None
    return maker
