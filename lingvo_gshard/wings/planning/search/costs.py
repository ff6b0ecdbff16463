"""Shards einsums over a mesh, and says what that costs one device in seconds and bytes.

Each mesh axis shards one letter of the einsum, in operands and result alike. Operands with another
sharding are resharded first, and so is the result afterwards. Sharding a contracted letter leaves
partial sums: an all-reduce, or a reduce-scatter if the axis shards the result.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping

from lingvo_gshard.sharding import Mesh, Split
from lingvo_gshard.wings.planning.search.candidates import Tensor

# The sharding of a tensor: mesh axis -> the letter that it shards. Unused axes are left out.
Sharding = Mapping[str, str]

# A reshape turns rows (B) into groups (G), and query positions (L) into key positions (K). Neither
# moves data between devices.
_SAME = str.maketrans({"G": "B", "K": "L"})


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective over mesh axes. `bytes` is the larger of operand and result on one device."""

    kind: str
    axes: tuple[str, ...]
    bytes: int


def sharding_of(tensor: Tensor, split: Split) -> dict[str, str]:
    """Returns the sharding of a tensor whose dimensions are split over these axes."""
    return {
        axis: letter for letter, axes in zip(tensor.layout, split, strict=True) for axis in axes
    }


def local_bytes(tensor: Tensor, where: Sharding, mesh: Mesh) -> int:
    """Returns the bytes of the largest shard."""
    return local_elements(tensor, where, mesh) * tensor.itemsize


def local_elements(tensor: Tensor, where: Sharding, mesh: Mesh) -> int:
    """Returns the number of elements of the largest shard."""
    return math.prod(
        -(-size // num_shards(letter, where, mesh))
        for letter, size in zip(tensor.layout, tensor.shape, strict=True)
    )


def num_shards(letter: str, where: Sharding, mesh: Mesh) -> int:
    """Returns the number of shards of a letter's dimension."""
    if letter not in where.values():
        return 1
    sizes = _sizes(mesh)
    return math.prod(sizes[axis] for axis, x in where.items() if x == letter)


@functools.cache
def _sizes(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.axes)


def resharding(tensor: Tensor, before: Sharding, after: Sharding, mesh: Mesh) -> list[Collective]:
    """Returns the collectives that change a tensor's sharding from `before` to `after`.

    An axis that moves from one dimension to another costs an all-to-all. An axis that no longer
    shards the tensor costs an all-gather. Sharding a replicated dimension is free.
    """
    if before == after:
        return []
    letters = set(tensor.layout.translate(_SAME))
    exchanged: dict[tuple[str, str], list[str]] = {}
    gathered: list[str] = []
    for axis in _sizes(mesh):
        source = before.get(axis, "").translate(_SAME)
        target = after.get(axis, "").translate(_SAME)
        if not source or source == target:
            continue
        if target in letters:
            exchanged.setdefault((source, target), []).append(axis)
        else:
            gathered.append(axis)
    calls = [
        Collective("all-to-all", tuple(axes), local_bytes(tensor, before, mesh))
        for axes in exchanged.values()
    ]
    if gathered:
        whole = local_bytes(tensor, before, mesh) * mesh.parts(gathered)
        calls.append(Collective("all-gather", tuple(gathered), whole))
    return calls


# Index of the result where 0 and 1 are the operands.
RESULT = 2


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """A tensor with its sharding. If it is free, each device can compute any shard by itself."""

    tensor: Tensor
    where: Sharding
    is_free: bool = False


@dataclasses.dataclass(frozen=True)
class ShardedEinsum:
    """The work of one device for an einsum.

    Attributes:
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
    """Returns the fastest sharded einsum among those that XLA's partitioner may choose."""
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
    fixed = [operand.where for operand in operands if not operand.is_free]
    # An operand is sharded over the axis by a letter, or replicated.
    contracted = [
        letter
        for letter in sorted(current - set(result.tensor.layout))
        if all(where.get(axis, letter) == letter for where in fixed)
    ]
    if any(all(where.get(axis) == letter for where in fixed) for letter in contracted):
        return contracted
    output_letters = sorted(current & set(result.tensor.layout) | {wanted})
    return [*contracted, *output_letters]


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
    moved = resharding(result.tensor, computed | scattered, result.where, mesh)
    calls += [(RESULT, call) for call in moved]
    output = local_bytes(result.tensor, computed, mesh)
    weights = tuple(i for i, operand in enumerate(operands) if operand.tensor.is_weight)
    if any(operand.is_free for operand in operands):
        return ShardedEinsum(0, 2 * min(output, traffic), tuple(calls), weights)
    tensors = (each.tensor for each in (*operands, result))
    sizes = {x: n for t in tensors for x, n in zip(t.layout, t.shape, strict=True)}
    flops = 2 * math.prod(-(-n // num_shards(x, used, mesh)) for x, n in sizes.items())
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


# collective_seconds(kind, bytes, axes, mesh): time of a collective along mesh axes. `kind` is as in
# HLO; `bytes` is the larger of operand and result on one device.
CollectiveSeconds = Callable[[str, int, tuple[str, ...], Mesh], float]


@dataclasses.dataclass(frozen=True)
class Rates:
    """Speed and memory of one device.

    Attributes:
      flops_per_second: rate of matrix products by dtype; a multiply-add counts 2.
      bytes_per_second: memory bandwidth.
      capacity: bytes that a program may use.
      host_bytes_per_second: bandwidth between the device's memory and its host's in one
        direction; None if arrays cannot be kept there.
      platform: one of `platforms.PLATFORMS`; "" for CPUs.
    """

    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    capacity: int
    collective_seconds: CollectiveSeconds
    host_bytes_per_second: float | None = None
    platform: str = ""

    def matmul_seconds(self, flops: int, bytes: int, dtype: str) -> float:
        """Returns the time of a matrix product, limited by arithmetic or by memory bandwidth."""
        rate = self.flops_per_second.get(dtype) or min(self.flops_per_second.values())
        return max(flops / rate, bytes / self.bytes_per_second)

    def memory_seconds(self, bytes: int) -> float:
        """Returns the time to read or write this many bytes."""
        return bytes / self.bytes_per_second

    def host_seconds(self, bytes: int) -> float:
        """Returns the time to copy this many bytes between device and host, in one direction."""
        if not bytes:
            return 0.0
        return bytes / self.host_bytes_per_second if self.host_bytes_per_second else math.inf


FORWARD, BACKWARD, REMATERIALIZED, OPTIMIZER = "forward", "backward", "rematerialized", "optimizer"


@dataclasses.dataclass
class Cost:
    """Seconds and bytes of one device in one step.

    Attributes:
      compute_seconds: time of einsums, lookups and the optimizer.
      host_seconds: time of copies between device and host that no computation hides.
      saved: bytes of activations that are saved for the backward pass, on the device.
      hosted: bytes of activations that are saved in the memory of the host.
      recomputed: bytes of activations that one rematerialization unit recomputes.
      stacked_gradients: bytes of weight gradients of loops, allocated before the backward pass.
      accumulated: bytes of the sums of gradients over micro-batches.
      workspace: bytes of the tensors and gradients of the largest einsum.
      calls: (collective, phase, number of executions).
      exchanges: seconds that the rows of dropless experts travel, by the name of the exchange. The
        fastest is part of `communication_seconds`.
    """

    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    host_seconds: float = 0.0
    flops: int = 0
    weights: int = 0
    moments: int = 0
    saved: int = 0
    hosted: int = 0
    recomputed: int = 0
    gradients: int = 0
    stacked_gradients: int = 0
    accumulated: int = 0
    workspace: int = 0
    calls: list[tuple[Collective, str, int]] = dataclasses.field(default_factory=list)
    exchanges: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def exchange(self) -> str:
        """Returns the name of the fastest exchange; empty without dropless experts."""
        return min(self.exchanges, key=self.exchanges.__getitem__, default="")

    @property
    def seconds(self) -> float:
        """Returns the time without overlap of computation and communication."""
        return self.compute_seconds + self.communication_seconds + self.host_seconds

    @property
    def resident(self) -> tuple[int, int]:
        """Returns the bytes, without `workspace`, at the start and the end of the backward pass."""
        state = self.weights + self.moments + self.accumulated + self.recomputed
        return state + self.saved + self.stacked_gradients, state + self.gradients

    @property
    def peak(self) -> int:
        """Returns the bytes at the fuller of both times."""
        return max(self.resident) + self.workspace

    def add(self, other: Cost) -> None:
        """Adds the cost of other layers. Their workspaces are not in use at the same time."""
        own, added = vars(self), vars(other)
        for name in _SUMS:
            own[name] += added[name]
        self.workspace = max(self.workspace, other.workspace)
        self.calls += other.calls
        if other.exchanges:
            self.exchanges.update(other.exchanges)

    def repeated(self, times: int) -> Cost:
        """Returns the cost of `times` executions, one after another in the same memory."""
        return dataclasses.replace(
            self,
            compute_seconds=times * self.compute_seconds,
            communication_seconds=times * self.communication_seconds,
            host_seconds=times * self.host_seconds,
            flops=times * self.flops,
            calls=[(call, phase, times * count) for call, phase, count in self.calls],
            exchanges=collections.Counter({n: times * each for n, each in self.exchanges.items()}),
        )


# The fields that are numbers and add up.
_SUMS = [
    field.name
    for field in dataclasses.fields(Cost)
    if field.name not in ("workspace", "calls", "exchanges")
]
