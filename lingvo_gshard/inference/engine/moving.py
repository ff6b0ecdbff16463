"""Moves rows to a state of another shape, on the host.

A move is rare, so that copying costs less than compiling a program for each pair of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.layers.attention.mask import MASKED
from lingvo_gshard.runtime.program.array import Array


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
    old = state["state.caches[0].key"].shape[2] // beam
    (first,) = (a for a in targets if a.path == "state.caches[0].key")
    new = first.shape[2] // beam
    kept = min(old, new)
    # Position i of the new ring is the old one of the age kept - i.
    positions = (int(state["state.time"]) - kept + np.arange(kept)) % old
    taken = []
    for array in targets:
        values = state[array.path]
        result = np.zeros(array.shape, values.dtype)
        if array.path == "state.time":
            result[...] = kept
        elif array.path.startswith("state.caches"):
            count, heads, _, dim = values.shape
            ring = values.reshape(count, heads, old, beam, dim)[rows][:, :, positions]
            slots = result.reshape(array.shape[0], heads, new, beam, dim)
            slots[: len(rows), :, :kept] = ring
        elif array.path == "state.ancestor_BWT":
            result[: len(rows), :, :kept] = values[rows][:, :, positions]
        else:
            if array.path == "state.memory.bias_BK":
                result[:] = MASKED
            part = values[rows]
            sizes = map(min, part.shape, result.shape)
            where = tuple(slice(size) for size in sizes)
            result[where] = part[where]
        taken.append(result)
    return taken
