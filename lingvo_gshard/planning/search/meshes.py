"""Shapes of meshes that are worth a look."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lingvo_gshard.sharding.mesh import Mesh

_LETTERS = "abc"


def shapes(devices: int, torus: tuple[int, ...] = (), most_axes: int = 3) -> list[tuple[int, ...]]:
    """Returns the sizes of up to `most_axes` axes that multiply to the devices, fewest axes first.

    Of three axes only in falling order: which of them is which is the tables' choice, and the last
    one, whose devices are neighbors, had better be the smallest.
    torus: of the interconnect; then axes do not cut across its dimensions.
    """
    found: list[tuple[int, ...]] = []
    for axes in range(1, most_axes + 1):
        for sizes in _factorizations(devices, axes):
            is_ordered = axes < 3 or list(sizes) == sorted(sizes, reverse=True)
            if is_ordered and _follows(sizes, torus):
                found.append(sizes)
    return found


def unnamed(sizes: tuple[int, ...]) -> Mesh:
    """Returns a mesh of these sizes, whose axes have names that say nothing."""
    return Mesh(tuple(zip(_LETTERS, sizes, strict=False)))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write a number as a product of `count` factors larger than 1."""
    if count == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, count - 1):
                yield (first, *rest)


def _follows(sizes: tuple[int, ...], torus: tuple[int, ...]) -> bool:
    """Whether every axis is a part of a torus's dimension, or several whole ones."""
    if math.prod(torus) != math.prod(sizes):
        return True
    ends = [math.prod(torus[i:]) for i in range(len(torus))]
    starts = [math.prod(sizes[i:]) for i in range(len(sizes))]
    return all(a % b == 0 or b % a == 0 for a in ends for b in starts)
