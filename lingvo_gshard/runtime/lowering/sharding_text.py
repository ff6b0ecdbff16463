"""Reads shardings as HLO writes them: tiles of numbered devices.

The format is that of HloSharding::ToString in XLA's xla/hlo/ir/hlo_sharding.cc.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

_TILED = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\](?:(?P<list>\d[\d,]*)"
    r"|<=\[(?P<iota>[\d,]+)\](?:T\((?P<permutation>[\d,]+)\))?)"
    r"(?P<copies> last_tile_dim_replicate)?\}"
)


def split_of_text(text: str, rank: int, mesh: Mesh) -> Split | None:
    """Returns the split over a mesh that the text of an HLO sharding describes.

    Args:
      text: the sharding, such as "{devices=[4,1,2]<=[8] last_tile_dim_replicate}".
      rank: the tensor's number of dimensions.
      mesh: the mesh.

    Returns:
      the split; None if the sharding is no split over the mesh's axes.
    """
    if text == "{replicated}":
        return ((),) * rank
    match = _TILED.fullmatch(text)
    tiles = _numbers(match["tiles"]) if match else []
    sizes = tiles[:-1] if match and match["copies"] else tiles
    if match and len(sizes) == rank and math.prod(tiles) == mesh.size:
        for split in _candidates(tuple(sizes), mesh):
            if np.array_equal(_device_sets(_devices(match, tiles), len(sizes)), _sets(split, mesh)):
                return split
    return None


def _candidates(sizes: tuple[int, ...], mesh: Mesh) -> Iterator[Split]:
    """Yields each assignment of axes to dimensions that splits dimension i into sizes[i] parts."""
    choices = [
        [
            axes
            for count in range(len(mesh.names) + 1)
            for axes in itertools.permutations(mesh.names, count)
            if math.prod(mesh.axis_size(axis) for axis in axes) == size
        ]
        for size in sizes
    ]
    for split in itertools.product(*choices):
        used = [axis for axes in split for axis in axes]
        if len(set(used)) == len(used):
            yield split


def _devices(match: re.Match, tiles: list[int]) -> np.ndarray:
    if match["list"]:
        return np.array(_numbers(match["list"])).reshape(tiles)
    ids = np.arange(math.prod(tiles)).reshape(_numbers(match["iota"]))
    if match["permutation"]:
        ids = ids.transpose(_numbers(match["permutation"]))
    return ids.reshape(tiles)


def _sets(split: Split, mesh: Mesh) -> np.ndarray:
    used = [axis for axes in split for axis in axes]
    order = used + [axis for axis in mesh.names if axis not in used]
    parts = [math.prod(mesh.axis_size(axis) for axis in axes) for axes in split]
    ids = mesh.ids.transpose([mesh.names.index(axis) for axis in order])
    return _device_sets(ids.reshape([*parts, -1]), len(parts))


def _device_sets(devices: np.ndarray, rank: int) -> np.ndarray:
    """Returns the devices of each tile, with replicas of a tile in ascending order."""
    return np.sort(devices.reshape([*devices.shape[:rank], -1]), axis=-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
