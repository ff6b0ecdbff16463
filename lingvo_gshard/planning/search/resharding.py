"""Resharding: the collectives that change how a tensor is sharded."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from lingvo_gshard.planning.search.trace.graph import Tensor
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

# How a tensor is sharded: mesh axis -> the letter that it shards. Unused axes are left out.
Sharding = Mapping[str, str]

# A reshape turns rows (B) into groups (G), and query positions (L) into key positions (K). Neither
# moves data between devices.
_SAME = str.maketrans({"G": "B", "K": "L"})


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective over mesh axes.

    Attributes:
      kind: as in HLO, such as "all-to-all".
      axes: mesh axes of its device groups.
      bytes: the larger of operand and result on one device.
    """

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
        parts = mesh.parts(gathered)
        gathered_bytes = local_bytes(tensor, before, mesh) * parts
        calls.append(Collective("all-gather", tuple(gathered), gathered_bytes))
    return calls
