"""Pictures of routers: the load of each expert over time, and by kind of token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

# Columns of a picture over time. A longer history is averaged to half as many.
_MOST_COLUMNS = 256
# Sizes of a picture's squares, in pixels.
_SMALLEST, _LARGEST, _WIDTH = 2, 16, 512
# The colors of no load, of an even load and of all the load.
_PALE, _EVEN, _FULL = (246, 248, 250), (64, 146, 198), (8, 24, 68)
_NO_TOKEN = (196, 48, 43)


class LoadHistory:
    """The shares of a layer's experts over the watched steps so far, in few columns."""

    def __init__(self):
        self._columns: list[np.ndarray] = []
        self._steps_per_column = 1
        self._waiting: list[np.ndarray] = []

    def add(self, load: np.ndarray) -> None:
        """Adds the shares [E] of one watched step."""
        self._waiting.append(load)
        if len(self._waiting) < self._steps_per_column:
            return
        self._columns.append(np.mean(self._waiting, 0))
        self._waiting = []
        if len(self._columns) == _MOST_COLUMNS:
            pairs = np.reshape(self._columns, (_MOST_COLUMNS // 2, 2, -1))
            self._columns = list(pairs.mean(1))
            self._steps_per_column *= 2

    def table(self) -> np.ndarray:
        """Returns the shares [E, columns], oldest first."""
        rest = [np.mean(self._waiting, 0)] if self._waiting else []
        return np.stack([*self._columns, *rest], 1)


def heat_map(shares: np.ndarray, experts: int) -> np.ndarray:
    """Returns a picture of shares of the load, uint8 [height, width, 3].

    A pale square is little load, a blue one an even load, a dark one all of it. Red is none at all.

    Args:
      shares: the share of each row and column, 0 to 1.
      experts: E; 1/E is an even load.
    """
    relative = shares * experts
    # 0 for no load, 1/2 for an even one, towards 1 for all of it.
    height = (relative / (1.0 + relative))[..., None]
    pale, even, full = (np.array(color, np.float64) for color in (_PALE, _EVEN, _FULL))
    below = pale + (even - pale) * np.minimum(2.0 * height, 1.0)
    color = np.where(height <= 0.5, below, even + (full - even) * (2.0 * height - 1.0))
    color = np.where((shares == 0)[..., None], np.array(_NO_TOKEN, np.float64), color)
    cell = int(np.clip(_WIDTH // max(shares.shape), _SMALLEST, _LARGEST))
    return np.kron(np.rint(color).astype(np.uint8), np.ones((cell, cell, 1), np.uint8))


def by_kind(counts: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Returns a picture with a row for each kind of token and a column for each expert."""
    table = np.array(list(counts.values()), np.float64)
    shares = table / np.maximum(table.sum(1, keepdims=True), 1.0)
    return heat_map(shares, table.shape[1])
