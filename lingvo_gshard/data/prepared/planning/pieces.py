"""Pieces: the parts of rows that are packed into batches, known from the rows' lengths alone."""

from __future__ import annotations

import dataclasses

import numpy as np

Bucket = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Parts of rows.

    Attributes:
      rows: int64 [N], number of each piece's row.
      begins: int64 [N], the first target token of each piece; sources are always whole.
      lengths: int64 [N,2], source and target tokens of each piece.
    """

    rows: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: np.ndarray) -> Pieces:
        """Returns some of the pieces."""
        return Pieces(self.rows[chosen], self.begins[chosen], self.lengths[chosen])

    def plus(self, other: Pieces) -> Pieces:
        """Returns these pieces and others after them."""
        return Pieces(
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.begins, other.begins]),
            np.concatenate([self.lengths, other.lengths]),
        )


def no_pieces() -> Pieces:
    """Returns pieces of nothing."""
    return whole_rows(np.zeros(0, np.int64), np.zeros((0, 2), np.int64))


def whole_rows(rows: np.ndarray, lengths: np.ndarray) -> Pieces:
    """Returns one piece for each row."""
    return Pieces(rows, np.zeros(len(rows), np.int64), lengths)


def windows(rows: np.ndarray, lengths: np.ndarray, length: int) -> Pieces:
    """Returns rows cut into windows of `length` target tokens; the last of a row may be shorter.

    Args:
      rows: numbers of the rows.
      lengths: source and target tokens of each row.
      length: target tokens of a window.
    """
    tokens = lengths[:, 1]
    counts = -(-tokens // length)
    of_window = np.repeat(np.arange(len(rows)), counts)
    begins = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * length
    sizes = np.minimum(length, tokens[of_window] - begins)
    return Pieces(rows[of_window], begins, np.stack([sizes, sizes], axis=1))


def bucket_of(lengths: np.ndarray, buckets: list[Bucket]) -> np.ndarray:
    """Returns the first bucket whose rows hold each piece; -1 if none does, or a side is empty.

    Args:
      lengths: source and target tokens of each piece.
      buckets: rows, source length and target length of the batches of each bucket.
    """
    result = np.full(len(lengths), -1)
    for index in reversed(range(len(buckets))):
        result[(lengths <= buckets[index][1:]).all(axis=1)] = index
    result[lengths.min(axis=1, initial=1) == 0] = -1
    return result
