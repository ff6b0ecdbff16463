"""Shards one einsum over a mesh: what each device computes and which collectives it needs.

Each mesh axis shards one letter of the einsum, in operands and result alike. Operands with another
sharding are resharded first, and so is the result afterwards. Sharding a contracted letter leaves
partial sums: an all-reduce, or a reduce-scatter if the axis shards the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from lingvo_gshard.planning.search.costs.rates import Rates
from lingvo_gshard.planning.search.resharding import (
    Collective,
    Sharding,
    local_bytes,
    num_shards,
    resharding,
)
from lingvo_gshard.planning.search.trace.graph import Tensor
from lingvo_gshard.sharding.mesh import Mesh

# Index of the result where 0 and 1 are the operands.
RESULT = 2


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """A tensor with its sharding.

    Attributes:
      tensor: the tensor.
      where: its sharding.
      is_free: whether every device can compute any shard of it without communication.
    """

    tensor: Tensor
    where: Sharding
    is_free: bool = False


@dataclasses.dataclass(frozen=True)
class ShardedEinsum:
    """The work of one device for an einsum.

    Attributes:
      flops: floating-point operations.
      bytes: bytes read and written.
      calls: (index of the operand, or RESULT; collective that moves it).
      gathers: indices of the operands that are weights.
    """

    flops: int
    bytes: int
    calls: tuple[tuple[int, Collective], ...]
    gathers: tuple[int, ...] = ()

    def seconds(self, rates: Rates, mesh: Mesh, dtype: str) -> float:
        """Returns the time of one execution without overlap of collectives and einsum."""
        communication = sum(
            rates.collective_seconds(call.kind, call.bytes, call.axes, mesh)
            for _, call in self.calls
        )
        return communication + rates.matmul_seconds(self.flops, self.bytes, dtype)


def shard_einsum(
    operands: tuple[ShardedTensor, ShardedTensor], result: ShardedTensor, mesh: Mesh, rates: Rates
) -> ShardedEinsum:
    """Returns the fastest of the ways in which XLA's partitioner may compute an einsum.

    Args:
      operands: the operands with their current sharding.
      result: the result with the sharding that is required.
      mesh: the mesh.
      rates: speed of the devices.
    """
    choices = [_letters(axis, operands, result) for axis in mesh.names]
    sharded = [
        _sharded(dict(zip(mesh.names, letters, strict=True)), operands, result, mesh)
        for letters in itertools.product(*choices)
    ]
    return min(sharded, key=lambda e: e.seconds(rates, mesh, result.tensor.dtype))


def _letters(axis: str, operands: tuple[ShardedTensor, ...], result: ShardedTensor) -> list[str]:
    """Returns the letters that an axis may shard; "" replicates the computation over it."""
    wanted = result.where.get(axis, "")
    current = {operand.where.get(axis, "") for operand in operands} - {""}
    contracted = [
        letter
        for letter in sorted(current - set(result.tensor.layout))
        if all(_can_contract(operand, letter, axis) for operand in operands)
    ]
    if any(_is_contracted_by_all(letter, axis, operands) for letter in contracted):
        return contracted
    output_letters = sorted(current & set(result.tensor.layout) | {wanted})
    return [*contracted, *output_letters]


def _can_contract(operand: ShardedTensor, letter: str, axis: str) -> bool:
    """Returns whether the operand is sharded over the axis by the letter, or replicated."""
    return operand.is_free or operand.where.get(axis, letter) == letter


def _is_contracted_by_all(letter: str, axis: str, operands: tuple[ShardedTensor, ...]) -> bool:
    return all(operand.is_free or operand.where.get(axis) == letter for operand in operands)


def _sharded(
    letters: dict[str, str], operands: tuple[ShardedTensor, ...], result: ShardedTensor, mesh: Mesh
) -> ShardedEinsum:
    used = {axis: letter for axis, letter in letters.items() if letter}
    calls: list[tuple[int, Collective]] = []
    traffic = 0
    for number, operand in enumerate(operands):
        needed = {a: x for a, x in used.items() if x in operand.tensor.layout}
        if operand.is_free:
            continue
        calls += [(number, c) for c in resharding(operand.tensor, operand.where, needed, mesh)]
        traffic += local_bytes(operand.tensor, needed, mesh)
    layout = result.tensor.layout
    partial = [axis for axis, letter in used.items() if letter not in layout]
    computed = {axis: letter for axis, letter in used.items() if letter in layout}
    calls += [(RESULT, call) for call in _sums(partial, computed, result, mesh)]
    scattered = {a: x for a, x in result.where.items() if a in partial}
    calls += [
        (RESULT, c) for c in resharding(result.tensor, computed | scattered, result.where, mesh)
    ]
    sizes = {
        x: n
        for t in (*operands, result)
        for x, n in zip(t.tensor.layout, t.tensor.shape, strict=True)
    }
    is_lookup = any(operand.is_free for operand in operands)
    flops = 2 * math.prod(-(-n // num_shards(x, used, mesh)) for x, n in sizes.items())
    output = local_bytes(result.tensor, computed, mesh)
    weights = tuple(i for i, operand in enumerate(operands) if operand.tensor.is_weight)
    if is_lookup:
        return ShardedEinsum(0, 2 * min(output, traffic), tuple(calls), weights)
    return ShardedEinsum(flops, traffic + output, tuple(calls), weights)


def _sums(
    partial: list[str], computed: Sharding, result: ShardedTensor, mesh: Mesh
) -> list[Collective]:
    """Returns the reductions of partial sums: reduce-scatters where the result is sharded."""
    bytes = local_bytes(result.tensor, computed, mesh)
    scattered = tuple(axis for axis in partial if axis in result.where)
    reduced = tuple(axis for axis in partial if axis not in result.where)
    calls = []
    if scattered:
        calls.append(Collective("reduce-scatter", scattered, bytes))
        bytes //= mesh.parts(scattered)
    if reduced:
        calls.append(Collective("all-reduce", reduced, bytes))
    return calls
