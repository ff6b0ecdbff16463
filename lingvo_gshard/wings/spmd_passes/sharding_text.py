"""Reads and writes the text of HLO shardings, as splits over the axes of a mesh.

See HloSharding::ToString in XLA's xla/hlo/ir/hlo_sharding.cc for the format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.sharding import Mesh, Split, xla

_TILED = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\](?:(?P<list>\d[\d,]*)"
    r"|<=\[(?P<iota>[\d,]+)\](?:T\((?P<permutation>[\d,]+)\))?)"
    r"(?P<copies> last_tile_dim_replicate)?\}"
)


def split_of_text(text: str, rank: int, mesh: Mesh) -> Split | None:
    """Returns the split over a mesh that the text of an HLO sharding describes; None if it is none.

    A text is such as "{devices=[4,1,2]<=[8] last_tile_dim_replicate}".
    """
    if text == "{replicated}":
        return ((),) * rank
    match = _TILED.fullmatch(text)
    tiles = _numbers(match["tiles"]) if match else []
    sizes = tiles[:-1] if match and match["copies"] else tiles
    if match and len(sizes) == rank:
        return xla.split_of_tiling(_devices(match, tiles), rank, mesh)
    return None


def _devices(match: re.Match, tiles: list[int]) -> np.ndarray:
    if match["list"]:
        return np.array(_numbers(match["list"])).reshape(tiles)
    ids = np.arange(math.prod(tiles)).reshape(_numbers(match["iota"]))
    if match["permutation"]:
        ids = ids.transpose(_numbers(match["permutation"]))
    return ids.reshape(tiles)


def text_of_split(split: Split, mesh: Mesh) -> str:
    """Returns the HLO sharding of a split over a mesh, equally long for all numbers of devices."""
    used = [axis for axes in split for axis in axes]
    rest = [axis for axis in mesh.names if axis not in used]
    copies = mesh.parts(rest)
    if copies == mesh.size:
        return "{replicated}"
    tiles = [*(mesh.parts(axes) for axes in split), *([copies] if copies > 1 else [])]
    order = [mesh.names.index(axis) for axis in (*used, *rest)]
    devices = f"[{_joined(mesh.shape)}]T({_joined(order)})"
    if order == sorted(order):
        devices = f"[{mesh.size}]"
    kept = " last_tile_dim_replicate" if copies > 1 else ""
    return f"{{devices=[{_joined(tiles)}]<={devices}{kept}}}"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
