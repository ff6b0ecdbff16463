"""Finds how values of a module are split, from the annotations of the values that they depend on.

XLA's partitioner propagates annotations in both directions and decides in the end. This module
follows operands only, as far as an operation keeps dimensions apart.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core.lazy import ir, stablehlo
from lingvo_gshard.runtime import annotation_of, maker_of, operations, shape_of
from lingvo_gshard.sharding import Mesh, Split
from lingvo_gshard.wings.spmd_passes.sharding_text import split_of_text

# Operations whose results and operands have the same dimensions.
_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "abs add and ceil compare convert cosine divide exponential exponential_minus_one floor "
        "is_finite log log_plus_one logistic maximum minimum multiply negate not or power "
        "remainder rsqrt select sign sine sqrt subtract tanh xor"
    ).split()
)
_REDUCE, _WHILE = "stablehlo.reduce", "stablehlo.while"
# Operations whose splits follow from all operands.
_OF_ALL_OPERANDS = {*_ELEMENTWISE, "stablehlo.dot_general", "stablehlo.concatenate"}


class ValueSplits:
    """The splits of a module's values over a mesh."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._found: dict[ir.Value, Split | None] = {}

    def of(self, value: ir.Value) -> Split | None:
        """Returns the mesh axes of each dimension; None if no annotation tells."""
        chain = [value]
        while chain:
            waiting = [x for x in self._needed(chain[-1]) if x not in self._found]
            if waiting:
                chain += waiting
            else:
                last = chain.pop()
                self._found[last] = self._split(last)
        return self._found[value]

    def _needed(self, value: ir.Value) -> list[ir.Value]:
        """Returns the operands that the split of a value follows from."""
        operation = maker_of(value)
        if operation is None:
            kept = _kept_by_loop(value)
            return [] if kept is None else [kept]
        if _stated(operation):
            return []
        if operation.name in _OF_ALL_OPERANDS:
            return list(operation.operands)
        if operation.name in _MOVES or operation.name == _REDUCE and len(operation.results) == 1:
            return [operation.operands[0]]
        if operation.name == _WHILE:
            body = operation.regions[1].blocks[0]
            return [body.operations[-1].operands[ir.OpResult(value).result_number]]
        if operation.name == "stablehlo.optimization_barrier":
            return [operation.operands[ir.OpResult(value).result_number]]
        return []

    def _split(self, value: ir.Value) -> Split | None:
        operation = maker_of(value)
        if not isinstance(value.type, ir.RankedTensorType):
            return None
        if operation is None:
            return next((self._found[each] for each in self._needed(value)), None)
        rank = len(shape_of(value))
        if text := _stated(operation):
            return _read(text, rank, self._mesh)
        known = [self._found[operand] for operand in self._needed(value)]
        if operation.name == "stablehlo.dot_general":
            return _of_product(operation, known)
        if operation.name == _REDUCE and known:
            gone = ir.DenseI64ArrayAttr(operation.attributes["dimensions"])
            return known[0] and tuple(a for i, a in enumerate(known[0]) if i not in list(gone))
        if operation.name in _MOVES and known[0] is not None:
            return _MOVES[operation.name](operation, known[0])
        told = [split for split in known if split is not None and len(split) == rank]
        split = max(told, key=lambda split: sum(map(len, split)), default=None)
        if split and not all(map(self._is_told, self._needed(value))):
            # A vector that is broadcast to an operand's shape does not tell how that is split.
            whole = [x for x in self._needed(value) if self._found[x] and not _is_broadcast(x)]
            if not any(split) or not whole:
                return None
        if split and operation.name == "stablehlo.concatenate":
            return None if split[ir.IntegerAttr(operation.attributes["dimension"]).value] else split
        return split

    def _is_told(self, value: ir.Value) -> bool:
        """Returns whether the split of an operand is known, or the operand is the same anywhere."""
        maker = maker_of(value)
        is_number = maker is not None and (
            maker.name == "stablehlo.constant"
            or (maker.name == "stablehlo.broadcast_in_dim" and not shape_of(maker.operands[0]))
        )
        return is_number or self._found[value] is not None


def _stated(operation: ir.Operation) -> str:
    """Returns the text of an annotation, or of what a manual region returns; "" for others."""
    if operations.call_target(operation) == operations.LEAVES_REGION:
        return ir.StringAttr(operation.attributes[operations.SHARDING]).value
    return annotation_of(operation)


def _kept_by_loop(value: ir.Value) -> ir.Value | None:
    """Returns what a loop starts an argument of its body with, if no iteration changes it."""
    block: Any = value.owner
    loop = block.owner.operation
    if loop.name != _WHILE or block != loop.regions[1].blocks[0]:
        return None
    index = ir.BlockArgument(value).arg_number
    returned = block.operations[-1].operands[index]
    maker = maker_of(returned)
    while maker and maker.name == "stablehlo.reshape" and maker.operands[0].type == returned.type:
        returned = maker.operands[0]
        maker = maker_of(returned)
    return loop.operands[index] if returned == value else None


def _is_broadcast(value: ir.Value) -> bool:
    maker = maker_of(value)
    return maker is not None and maker.name == "stablehlo.broadcast_in_dim"


def merged_dimensions(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns the smallest groups of adjacent dimensions that a reshape turns into each other."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right, before, after = [], [], 1, 1
        while not left and not right or before != after:
            if i < len(old) and (before <= after or j == len(new)):
                before *= old[i]
                left.append(i)
                i += 1
            else:
                after *= new[j]
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


@functools.lru_cache(maxsize=1024)
def _read(text: str, rank: int, mesh: Mesh) -> Split | None:
    return split_of_text(text, rank, mesh)


def _of_product(operation: ir.Operation, known: Sequence[Split | None]) -> Split | None:
    """Returns the split of a product's result, the contracted dimensions left out."""
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    gone = (
        [*numbers.lhs_batching_dimensions, *numbers.lhs_contracting_dimensions],
        [*numbers.rhs_batching_dimensions, *numbers.rhs_contracting_dimensions],
    )
    ranks = [len(shape_of(operand)) for operand in operation.operands]
    # If all dimensions of an operand are shared or summed, its split need not be known.
    if any(
        split is None and rank > len(g) for split, rank, g in zip(known, ranks, gone, strict=True)
    ):
        return None
    left, right = (split or ((),) * rank for split, rank in zip(known, ranks, strict=True))
    batch = [
        left[i] or right[j]
        for i, j in zip(
            numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions, strict=True
        )
    ]
    kept = [axes for i, axes in enumerate(left) if i not in gone[0]]
    kept += [axes for i, axes in enumerate(right) if i not in gone[1]]
    split, used = [], set()
    for axes in (*batch, *kept):
        split.append(tuple(axis for axis in axes if axis not in used))
        used.update(axes)
    return tuple(split)


def _transposed(operation: ir.Operation, split: Split) -> Split:
    return tuple(split[i] for i in ir.DenseI64ArrayAttr(operation.attributes["permutation"]))


def _broadcast(operation: ir.Operation, split: Split) -> Split:
    old, new = shape_of(operation.operands[0]), shape_of(operation.results[0])
    after: list[tuple[str, ...]] = [()] * len(new)
    places = ir.DenseI64ArrayAttr(operation.attributes["broadcast_dimensions"])
    for before, place in enumerate(places):
        if old[before] == new[place]:
            after[place] = split[before]
    return tuple(after)


def _same_sizes(operation: ir.Operation, split: Split) -> Split | None:
    """Returns the split after a slice or a padding, unless a split dimension changes its size."""
    old, new = shape_of(operation.operands[0]), shape_of(operation.results[0])
    is_kept = all(a == b or not axes for a, b, axes in zip(old, new, split, strict=True))
    return split if is_kept else None


def _reshaped(operation: ir.Operation, split: Split) -> Split | None:
    """Returns the split after a reshape; None if it is not known.

    A reshape merges groups of dimensions and divides them again. The mesh axes of the major
    dimension of a group pass to the major dimension of the result. A minor dimension must not be
    split.
    """
    old, new = shape_of(operation.operands[0]), shape_of(operation.results[0])
    if 0 in old:
        return None
    after: list[tuple[str, ...]] = [()] * len(new)
    for left, right in merged_dimensions(old, new):
        left = [i for i in left if old[i] > 1]
        right = [i for i in right if new[i] > 1]
        if any(split[i] for i in left[1:]):
            return None
        if left and right:
            after[right[0]] = split[left[0]]
    return tuple(after)


_MOVES = {
    "stablehlo.transpose": _transposed,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshaped,
    "stablehlo.slice": _same_sizes,
    "stablehlo.pad": _same_sizes,
}
