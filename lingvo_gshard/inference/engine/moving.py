"""Moves rows to a state of another shape, on the host.

A move is rare, so that copying costs less than compiling a program for each pair of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.layers.attention.mask import MASKED
from lingvo_gshard.runtime.program.array import Array

_TIME, _BIAS, _ANCESTOR = "state.time", "state.memory.bias_BK", "state.ancestor_BWT"
_RINGS = "state.caches"
_RING = f"{_RINGS}[0].key"
# The dimension of slots.
_SLOTS = 2


def moved(
    state: Mapping[str, np.ndarray],
    targets: Sequence[Array],
    beam: int,
    rows: Sequence[int],
) -> list[np.ndarray]:
    """Returns the arrays of a state of another shape, with some rows of a state.

    Args:
      state: path -> array. Positions that the new shape lacks must not be needed any more.
      targets: the arrays of the new state, in order.
      beam: W.
      rows: the rows to take; they become the first ones. The others are empty.
    """
    blocks: dict[str, list[Array]] = {}
    for array in targets:
        blocks.setdefault(_whole(array.path), []).append(array)
    whole = _joined(state)
    old, new = whole[_RING].shape[_SLOTS], sum(a.shape[_SLOTS] for a in blocks[_RING])
    old, kept = old // beam, min(old, new) // beam
    # Position i of the new ring is the old one of the age kept - i.
    positions = (int(state[_TIME]) - kept + np.arange(kept)) % old
    taken: dict[str, np.ndarray] = {}
    for path, values in whole.items():
        count, shape = len(blocks[path]), list(blocks[path][0].shape)
        if count > 1:
            shape[_SLOTS] *= count
        if path == _TIME:
            moved_values = np.full((), kept, values.dtype)
        elif path.startswith(_RINGS):
            moved_values = _ring(values[rows], shape, positions, beam)
        elif path == _ANCESTOR:
            moved_values = _placed(values[rows][:, :, positions], shape)
        else:
            moved_values = _placed(values[rows], shape, MASKED if path == _BIAS else 0)
        parts = np.split(moved_values, count, axis=_SLOTS) if count > 1 else [moved_values]
        taken |= {array.path: part for array, part in zip(blocks[path], parts, strict=True)}
    return [taken[array.path] for array in targets]


def _whole(path: str) -> str:
    """Returns the path of keys or values without the number of the block."""
    head, bracket, _ = path.rpartition("[")
    return head if bracket and head.endswith((".key", ".value")) else path


def _joined(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a state with the blocks of keys and values joined."""
    blocks: dict[str, list[np.ndarray]] = {}
    for path, values in state.items():
        blocks.setdefault(_whole(path), []).append(values)
    return {
        path: found[0] if len(found) == 1 else np.concatenate(found, axis=_SLOTS)
        for path, found in blocks.items()
    }


def _ring(values: np.ndarray, shape: Sequence[int], positions: np.ndarray, beam: int) -> np.ndarray:
    """Returns keys or values of some positions of a ring as the first ones of another ring."""
    count, heads, slots, dim = values.shape
    rings = values.reshape(count, heads, slots // beam, beam, dim)[:, :, positions]
    return _placed(rings.reshape(count, heads, len(positions) * beam, dim), shape)


def _placed(values: np.ndarray, shape: Sequence[int], fill: float = 0) -> np.ndarray:
    """Returns an array of another shape, which begins with what it holds of `values`."""
    result = np.full(shape, fill, values.dtype)
    where = tuple(slice(size) for size in map(min, values.shape, shape))
    result[where] = values[where]
    return result
