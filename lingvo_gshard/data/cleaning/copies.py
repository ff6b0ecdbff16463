"""Copies of rows between splits that a user gives, counted in two passes like leaks.

Pass one collects hashes of the rows of dev and test. Pass two looks through training for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lingvo_gshard.data.cleaning.near_duplicates import TextHashes, fold
from lingvo_gshard.data.sources.row import Row

# The parts of a row that are compared: all of it, or texts without case, digits, punctuation.
KINDS = ("exact", "folded", "source", "target")
EXACT, FOLDED, SOURCE, TARGET = range(len(KINDS))
_ROWS_AT_A_TIME = 4096


def hashes_of(rows: Sequence[Row]) -> np.ndarray:
    """Returns the hash of each kind of each row, uint64 [N, len(KINDS)].

    A row without a source has the same hash as its target, so that texts are counted once.
    """
    found = [np.zeros((0, len(KINDS)), np.uint64)]
    for begin in range(0, len(rows), _ROWS_AT_A_TIME):
        part = rows[begin : begin + _ROWS_AT_A_TIME]
        sources, targets = [fold(row.source) for row in part], [fold(row.target) for row in part]
        # Line ends are in no folded text, so that different kinds are of different texts.
        kinds = (
            [f"{row.language}\n\n\n{row.source}\n\n{row.target}" for row in part],
            [f"{r.language}\n\n{s}\n{t}" for r, s, t in zip(part, sources, targets, strict=True)],
            [f"{row.language}\n{source}" for row, source in zip(part, sources, strict=True)],
            [f"\n{target}" for target in targets],
        )
        found.append(np.stack([TextHashes(texts).whole() for texts in kinds], axis=1))
    return np.concatenate(found)


def contains(known: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Returns whether each hash is among the known ones, which are sorted; bool like `hashes`."""
    if not len(known):
        return np.zeros(hashes.shape, bool)
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return known[places] == hashes
