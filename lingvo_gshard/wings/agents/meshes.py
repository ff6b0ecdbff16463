"""Meshes for fewer hosts than a job was planned for."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from lingvo_gshard.core import UserError
from lingvo_gshard.sharding import Mesh

# Axes that may shrink, the first one first: fewer devices along `fsdp` need more memory of each.
# Experts are along `data`. The other axes split single rows or layers, and stay.
ELASTIC_AXES = ("data", "fsdp")


def mesh_choices(mesh: str | None, hosts: int, others: Sequence[str] = ()) -> dict[int, str | None]:
    """Returns the mesh for each number of hosts that can train.

    A smaller size of an axis divides the full one. The global batch and the experts, which the full
    mesh divides, can then be divided as well, and each device has an equal share of them.

    Args:
      mesh: the mesh of all hosts; None: as the command has it, for all hosts only.
      others: meshes for fewer hosts, which take precedence.

    Returns:
      Number of hosts -> mesh.

    Raises:
      UserError: the hosts cannot have equal parts of a mesh.
    """
    if mesh is None:
        if others:
            raise UserError(f"`other_mesh={others[0]}` needs a `mesh` in the command")
        return {hosts: None}
    full = Mesh.parse(mesh)
    if full.size % hosts:
        raise UserError(
            f"`mesh={mesh}` has {full.size} devices, which {hosts} hosts cannot share equally"
        )
    each = full.size // hosts
    found: dict[int, str | None] = {}
    for smaller in _smaller(full):
        if smaller.size % each == 0:
            found.setdefault(smaller.size // each, str(smaller))
    for text in others:
        other = Mesh.parse(text)
        if other.size % each or other.size > full.size:
            raise UserError(
                f"`other_mesh={text}` has {other.size} devices; a multiple of {each}, which each "
                f"host has, and at most {full.size} were expected"
            )
        found[other.size // each] = text
    return found


def _smaller(full: Mesh) -> list[Mesh]:
    """Returns the mesh and all smaller ones, those with the least change of later axes first."""
    sizes = []
    for name, size in full.axes:
        divisors = [n for n in range(size, 0, -1) if size % n == 0]
        sizes.append(divisors if name in ELASTIC_AXES else [size])
    meshes = [
        dataclasses.replace(full, axes=tuple(zip(full.names, chosen, strict=True)))
        for chosen in itertools.product(*sizes)
    ]

    def loss(mesh: Mesh) -> tuple[float, ...]:
        """Returns the shrinking of each axis. A smaller `data` is better than a smaller `fsdp`."""
        wanted = dict(full.axes)
        return tuple(
            math.log(wanted[axis] / size) if (size := dict(mesh.axes).get(axis)) else 0.0
            for axis in reversed(ELASTIC_AXES)
        )

    return sorted(meshes, key=loss)
