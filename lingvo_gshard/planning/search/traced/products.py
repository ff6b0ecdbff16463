"""One product on a mesh: how it is partitioned, what each device computes and what moves.

Each axis splits one letter of the product's index space, of operands and result alike: operands
that lie otherwise are brought there, and so is the result. A contracted letter leaves partial sums,
which are an all-reduce, or a reduce-scatter where the axis is to split the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from lingvo_gshard.planning.search.costs.rates import Rates
from lingvo_gshard.planning.search.layouts import Call, Placed, changes, local_bytes, parts_of
from lingvo_gshard.planning.search.traced.graph import Tensor
from lingvo_gshard.sharding.mesh import Mesh

# Which of an execution's tensors a collective moves.
RESULT = 2


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor and where it lies. is_free: one that is computed wherever it is wanted."""

    tensor: Tensor
    where: Placed
    is_free: bool = False


@dataclasses.dataclass(frozen=True)
class Execution:
    """What one device does: flops and bytes of the product, and calls with whose tensor they move.

    A call's number is that of the operand, or RESULT. gathers: the weights' numbers.
    """

    flops: int
    bytes: int
    calls: tuple[tuple[int, Call], ...]
    gathers: tuple[int, ...] = ()

    def seconds(self, rates: Rates, mesh: Mesh, dtype: str) -> float:
        """Returns the time of one execution, the collectives not hidden behind the product."""
        moved = sum(
            rates.collective_seconds(call.kind, call.bytes, call.axes, mesh)
            for _, call in self.calls
        )
        return moved + rates.product_seconds(self.flops, self.bytes, dtype)


def execute(
    operands: tuple[Operand, Operand], result: Operand, mesh: Mesh, rates: Rates
) -> Execution:
    """Returns the fastest way of computing a product, of those that XLA's partitioner knows.

    result: its tensor, and where it is wanted.
    """
    choices = [_letters(axis, operands, result) for axis in mesh.names]
    found = [
        _execution(dict(zip(mesh.names, letters, strict=True)), operands, result, mesh)
        for letters in itertools.product(*choices)
    ]
    return min(found, key=lambda e: e.seconds(rates, mesh, result.tensor.dtype))


def _letters(axis: str, operands: tuple[Operand, ...], result: Operand) -> list[str]:
    """The letters that an axis may split; "" where all its devices compute the same."""
    wanted = result.where.get(axis, "")
    given = {operand.where.get(axis, "") for operand in operands} - {""}
    contracted = [
        letter
        for letter in sorted(given - set(result.tensor.layout))
        if all(_can_contract(operand, letter, axis) for operand in operands)
    ]
    if any(_is_contracted_by_all(letter, axis, operands) for letter in contracted):
        return contracted
    kept = sorted(given & set(result.tensor.layout) | {wanted})
    return [*contracted, *kept]


def _can_contract(operand: Operand, letter: str, axis: str) -> bool:
    """Whether the operand's part along the axis is there, or can be cut out of it."""
    return operand.is_free or operand.where.get(axis, letter) == letter


def _is_contracted_by_all(letter: str, axis: str, operands: tuple[Operand, ...]) -> bool:
    return all(operand.is_free or operand.where.get(axis) == letter for operand in operands)


def _execution(
    letters: dict[str, str], operands: tuple[Operand, ...], result: Operand, mesh: Mesh
) -> Execution:
    used = {axis: letter for axis, letter in letters.items() if letter}
    calls: list[tuple[int, Call]] = []
    moved = 0
    for number, operand in enumerate(operands):
        there = {a: x for a, x in used.items() if x in operand.tensor.layout}
        if operand.is_free:
            continue
        calls += [(number, c) for c in changes(operand.tensor, operand.where, there, mesh)]
        moved += local_bytes(operand.tensor, there, mesh)
    layout = result.tensor.layout
    partial = [axis for axis, letter in used.items() if letter not in layout]
    computed = {axis: letter for axis, letter in used.items() if letter in layout}
    calls += [(RESULT, call) for call in _sums(partial, computed, result, mesh)]
    scattered = {a: x for a, x in result.where.items() if a in partial}
    calls += [(RESULT, c) for c in changes(result.tensor, computed | scattered, result.where, mesh)]
    sizes = {
        x: n
        for t in (*operands, result)
        for x, n in zip(t.tensor.layout, t.tensor.shape, strict=True)
    }
    is_lookup = any(operand.is_free for operand in operands)
    flops = 2 * math.prod(-(-n // parts_of(x, used, mesh)) for x, n in sizes.items())
    output = local_bytes(result.tensor, computed, mesh)
    weights = tuple(i for i, operand in enumerate(operands) if operand.tensor.is_weight)
    if is_lookup:
        return Execution(0, 2 * min(output, moved), tuple(calls), weights)
    return Execution(flops, moved + output, tuple(calls), weights)


def _sums(partial: list[str], computed: Placed, result: Operand, mesh: Mesh) -> list[Call]:
    """The sums of partial results over axes, left whole or scattered as the result is wanted."""
    bytes = local_bytes(result.tensor, computed, mesh)
    scattered = tuple(axis for axis in partial if axis in result.where)
    whole = tuple(axis for axis in partial if axis not in result.where)
    calls = []
    if scattered:
        calls.append(Call("reduce-scatter", scattered, bytes))
        bytes //= math.prod(mesh.axis_size(axis) for axis in scattered)
    if whole:
        calls.append(Call("all-reduce", whole, bytes))
    return calls
