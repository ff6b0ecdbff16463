"""RowFiller: packs pieces of two lengths into rows so that both sides of a row become full.

First-fit fills rows of 128 source positions to 94% on sentence pairs of 244 languages, since one
side of a row is often full while the other is not. Choosing each piece from thousands by how it
balances the sides fills 98%.
"""

from __future__ import annotations

import collections

import numpy as np

# Weight of balance between the sides, against 1 for a piece's size. Of 0, 1, 2 and 4, this weight
# filled the most positions in rows of 128 and of 512.
_BALANCE = 2.0


class RowFiller:
    """Fills rows one by one from a pool of pieces.

    A row begins with the piece that has been in the pool longest, so that no piece waits forever.
    While any other piece fits, the row takes the best one: a large piece that leaves its two sides
    equally full.
    """

    def __init__(self, source_length: int, target_length: int):
        """Starts with an empty pool.

        Args:
          source_length: source positions of a row.
          target_length: target positions of a row.
        """
        self._limits = source_length, target_length
        self._numbers: list[int] = []
        self._lengths = np.zeros((0, 2), np.int64)

    def __len__(self) -> int:
        """The number of pieces in the pool."""
        return len(self._numbers)

    def add(self, numbers: np.ndarray, lengths: np.ndarray) -> None:
        """Adds pieces to the pool.

        Args:
          numbers: int64 [N], what the caller knows each piece by.
          lengths: int64 [N,2], source and target tokens of each piece; they fit an empty row.
        """
        self._numbers += numbers.tolist()
        self._lengths = np.concatenate([self._lengths, lengths])

    def fill(self, left: int = 0) -> list[list[int]]:
        """Takes pieces from the pool as full rows.

        Args:
          left: number of pieces that stay in the pool, to choose from later; the last row may take
            some of them.

        Returns:
          The numbers of the pieces in each row.
        """
        pool = _Pool(self._lengths, self._limits)
        rows = []
        while pool.count > left:
            rows.append(pool.take_row())
        waiting = pool.waiting()
        numbers = self._numbers
        self._numbers = [numbers[place] for place in waiting]
        self._lengths = self._lengths[waiting]
        return [[numbers[place] for place in row] for row in rows]


class _Pool:
    """The pieces of a pool, grouped by their two lengths.

    Attributes:
      count: number of pieces that are not taken.
    """

    def __init__(self, lengths: np.ndarray, limits: tuple[int, int]):
        self._limits = limits
        self._pieces = lengths.tolist()
        # Sorted by the source's length: what fits is a prefix.
        kinds, of_piece = np.unique(lengths, axis=0, return_inverse=True)
        of_piece = of_piece.reshape(-1)
        self._source, self._target = kinds[:, 0].copy(), kinds[:, 1].copy()
        shares = kinds / np.asarray(limits)
        self._size, self._tilt = shares.sum(axis=1), shares[:, 0] - shares[:, 1]
        self._kind_of = of_piece.tolist()
        self._queues = [collections.deque() for _ in kinds]
        for place, kind in enumerate(self._kind_of):
            self._queues[kind].append(place)
        self._taken = [False] * len(self._pieces)
        self._oldest = 0
        self.count = len(self._pieces)

    def take_row(self) -> list[int]:
        """Takes the pieces of one row and returns their places."""
        while self._taken[self._oldest]:
            self._oldest += 1
        source_length, target_length = self._limits
        row, kind = [], self._kind_of[self._oldest]
        source_left, target_left = source_length, target_length
        while kind is not None:
            place = self._take(kind)
            row.append(place)
            source, target = self._pieces[place]
            source_left, target_left = source_left - source, target_left - target
            kind = self._best(source_left, target_left)
        return row

    def waiting(self) -> list[int]:
        """Returns the places of the pieces that are not taken."""
        return [place for place, is_taken in enumerate(self._taken) if not is_taken]

    def _take(self, kind: int) -> int:
        place = self._queues[kind].popleft()
        self._taken[place] = True
        self.count -= 1
        if not self._queues[kind]:
            # Never fits again.
            self._target[kind] = self._limits[1] + 1
        return place

    def _best(self, source_left: int, target_left: int) -> int | None:
        """Returns the kind of piece to take next; None if none fits."""
        end = int(np.searchsorted(self._source, source_left, side="right"))
        fits = np.flatnonzero(self._target[:end] <= target_left)
        if not len(fits):
            return None
        tilt = source_left / self._limits[0] - target_left / self._limits[1]
        cost = _BALANCE * np.abs(self._tilt[fits] - tilt) - self._size[fits]
        return int(fits[cost.argmin()])
