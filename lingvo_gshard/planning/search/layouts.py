"""Changes of layout: what moves when a tensor that is split one way is wanted another way."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from lingvo_gshard.planning.search.traced.graph import Tensor
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

# Of a tensor, the letter that each mesh axis splits; axes that split nothing are not there.
Placed = Mapping[str, str]

# Rows become groups, and queries' positions keys', by a reshape or a transpose that moves nothing.
_SAME = str.maketrans({"G": "B", "K": "L"})


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective: bytes of the larger of one device's operand and result."""

    kind: str
    axes: tuple[str, ...]
    bytes: int


def partitioning(tensor: Tensor, split: Split) -> dict[str, str]:
    """Returns the letter that each axis splits."""
    return {
        axis: letter for letter, axes in zip(tensor.layout, split, strict=True) for axis in axes
    }


def local_bytes(tensor: Tensor, where: Placed, mesh: Mesh) -> int:
    """Returns the bytes of one device's part, padded to the largest part."""
    return local_elements(tensor, where, mesh) * tensor.itemsize


def local_elements(tensor: Tensor, where: Placed, mesh: Mesh) -> int:
    """Returns the elements of one device's part, padded to the largest part."""
    return math.prod(
        -(-size // parts_of(letter, where, mesh))
        for letter, size in zip(tensor.layout, tensor.shape, strict=True)
    )


def parts_of(letter: str, where: Placed, mesh: Mesh) -> int:
    """Returns into how many parts a letter's dimension is cut."""
    if letter not in where.values():
        return 1
    sizes = _sizes(mesh)
    return math.prod(sizes[axis] for axis, x in where.items() if x == letter)


@functools.cache
def _sizes(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.axes)


def changes(tensor: Tensor, before: Placed, after: Placed, mesh: Mesh) -> list[Call]:
    """Returns the collectives that bring a tensor from one layout to another.

    An axis that leaves a dimension for another one is an all-to-all; one that leaves it for none,
    or for what is no dimension of the tensor, an all-gather. What is held whole is cut for nothing.
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
        Call("all-to-all", tuple(axes), local_bytes(tensor, before, mesh))
        for axes in exchanged.values()
    ]
    if gathered:
        parts = math.prod(mesh.axis_size(axis) for axis in gathered)
        whole = local_bytes(tensor, before, mesh) * parts
        calls.append(Call("all-gather", tuple(gathered), whole))
    return calls
