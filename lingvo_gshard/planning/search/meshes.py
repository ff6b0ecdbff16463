"""Enumerates the mesh shapes that the search tries."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lingvo_gshard.sharding.mesh import Mesh

_LETTERS = "abc"


def shapes(devices: int, torus: tuple[int, ...] = (), most_axes: int = 3) -> list[tuple[int, ...]]:
    """Returns mesh shapes of up to `most_axes` axes, fewest axes first.

    Three axes are listed only in descending order of size: the sharding options already permute
    their use, and the devices of the last axis are neighbors, so it is best the smallest.

    Args:
      devices: number of devices, the product of every shape.
      torus: shape of the interconnect. Axes then align with its dimensions.
      most_axes: maximum number of axes.
    """
    mesh_shapes: list[tuple[int, ...]] = []
    for axes in range(1, most_axes + 1):
        for sizes in _factorizations(devices, axes):
            is_ordered = axes < 3 or list(sizes) == sorted(sizes, reverse=True)
            if is_ordered and _follows(sizes, torus):
                mesh_shapes.append(sizes)
    return mesh_shapes


def unnamed(sizes: tuple[int, ...]) -> Mesh:
    """Returns a mesh of these sizes with placeholder names."""
    return Mesh(tuple(zip(_LETTERS, sizes, strict=False)))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields all ordered products of `count` factors larger than 1 that equal a number."""
    if count == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, count - 1):
                yield (first, *rest)


def _follows(sizes: tuple[int, ...], torus: tuple[int, ...]) -> bool:
    """Returns whether every axis divides a dimension of the torus or spans whole dimensions."""
    if math.prod(torus) != math.prod(sizes):
        return True
    ends = [math.prod(torus[i:]) for i in range(len(torus))]
    starts = [math.prod(sizes[i:]) for i in range(len(sizes))]
    return all(a % b == 0 or b % a == 0 for a in ends for b in starts)
