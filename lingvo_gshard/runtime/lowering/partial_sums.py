"""Adds partial sums on each device before devices add them up, so that they do so once.

A product over a split dimension leaves each device with a partial sum, and XLA's partitioner adds
these up over the devices at once. Where a program adds several such results, as the gradients of a
tensor that is used several times, each would be reduced by itself. XLA's AllReduceReassociate mends
that after partitioning, but not in every compiler, and not with another operation in between.

This module writes the partial sums out. A product over a dimension that is split over n devices
becomes n products, with a first dimension that is split over these devices, one on each. The
program adds those and then sums over the first dimension: one all-reduce, or one reduce-scatter.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core.lazy import ir
from lingvo_gshard.runtime.lowering import partial_operations as ops
from lingvo_gshard.runtime.lowering.annotations import annotation_of
from lingvo_gshard.runtime.lowering.value_splits import ValueSplits, maker_of
from lingvo_gshard.sharding.mesh import Mesh

_ADD = "stablehlo.add"


@dataclasses.dataclass(frozen=True)
class _Term:
    """A term of a sum.

    Attributes:
      value: what is added, before `movers`.
      movers: the operations that bring it into the shape of the sum, first one first.
      partial: how it can be computed as partial sums, or None.
    """

    value: ir.Value
    movers: tuple[ir.Operation, ...]
    partial: ops.Partial | None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which it is a sum of partial sums."""
        return self.partial.axes if self.partial else ()


def add_before_reducing(module: ir.Module, mesh: Mesh) -> None:
    """Rewrites sums of several terms that each need a reduction over the same mesh axes."""
    if mesh.size == 1:
        return
    sums: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == _ADD and _is_float(operation.results[0]):
            sums.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
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
        # Erased only now: the splits that were found are those of values that still exist.
        for operation in self._replaced:
            if all(not list(result.uses) for result in operation.results):
                operation.erase()

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
                    values = [ops.moved(term.value, term.movers) for term in group]
                for value in values:
                    total = value if total is None else ops.added(total, value)
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
            while maker and ops.passes(maker):
                movers, between = (maker, *movers), [*between, maker]
                value = maker.operands[0]
                maker = _own_maker(value, root)
            partial = maker and ops.partial_of(maker, self._splits, self._mesh)
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
            value = ops.moved(term.partial.build(), term.movers, axes, self._mesh)
            total = value if total is None else ops.added(total, value)
            if term.movers and annotation_of(term.movers[-1]):
                annotation = term.movers[-1]
        reduced = ops.summed(total, [0])
        return reduced if annotation is None else ops.moved(reduced, [annotation])


def _own_maker(value: ir.Value, root: ir.Operation) -> ir.Operation | None:
    """Returns the operation that computes a value beside a sum; None if it is used elsewhere."""
    maker = maker_of(value)
    if maker is None or len(list(value.uses)) != 1 or maker.block != root.block:
        return None
    return maker


def _is_float(value: ir.Value) -> bool:
    return isinstance(ir.RankedTensorType(value.type).element_type, ir.FloatType)
