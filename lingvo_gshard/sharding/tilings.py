"""Tilings: which devices hold which part of a tensor, as XLA numbers parts and devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split


def tiling(split: Split, mesh: Mesh) -> np.ndarray:
    """Returns the partition ids of a split over a mesh, [*shards, copies]."""
    used = [axis for axes in split for axis in axes]
    parts = [mesh.parts(axes) for axes in split]
    order = used + [axis for axis in mesh.names if axis not in used]
    return mesh.ids.transpose([mesh.names.index(axis) for axis in order]).reshape([*parts, -1])


def split_of_tiling(devices: np.ndarray, rank: int, mesh: Mesh) -> Split | None:
    """Returns the split that a tiling describes, or None if mesh axes cannot express it.

    Args:
      devices: Partition ids, [*shards, *copies]. The order of copies has no meaning.
      rank: Rank of the tensor, which is the number of dimensions of shards.
      mesh: The mesh.
    """
    if devices.size != mesh.size:
        return None
    devices = _sorted_copies(devices, rank)
    axes = [name for name, size in mesh.axes if size > 1]
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            split = _assign_axes(order, devices.shape[:rank], mesh)
            if split and np.array_equal(_sorted_copies(tiling(split, mesh), rank), devices):
                return split
    return None


def _sorted_copies(devices: np.ndarray, rank: int) -> np.ndarray:
    """Returns the same tiling with all copies in one last dimension, sorted."""
    return np.sort(devices.reshape([*devices.shape[:rank], -1]), axis=-1)


def _assign_axes(axes: Sequence[str], parts: Sequence[int], mesh: Mesh) -> Split | None:
    """Returns the split that assigns axes, in order, to dimensions of given numbers of shards.

    Returns None if the sizes of the axes do not match.
    """
    left, split = list(axes), []
    for count in parts:
        taken: list[str] = []
        while left and mesh.parts(taken) < count:
            taken.append(left.pop(0))
        if mesh.parts(taken) != count:
            return None
        split.append(tuple(taken))
    return None if left else tuple(split)
