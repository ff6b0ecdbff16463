"""Plan: which piece is where in each training batch, from lengths alone and without records.

The stream of rows is planned in chapters of some blocks. Within a chapter, pieces that fill no row
yet wait for the next block; at its end, all are placed. So a chapter is a function of the seed and
its number, every process makes the same plan, and a position is a block and a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.data.batching.permutations import permutation
from lingvo_gshard.data.batching.row_filler import RowFiller
from lingvo_gshard.data.prepared.planning.mixture import Mixture, Use
from lingvo_gshard.data.prepared.planning.pieces import Bucket, Pieces, bucket_of, no_pieces

# A chapter's last rows and batches are not as full as others: with 16 blocks of 8,192 pairs, that
# costs 0.3% of the positions. Resuming plans one chapter again, which takes 2 seconds at most.
BLOCKS_OF_CHAPTER = 16


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """A batch without its tokens.

    Attributes:
      bucket: number of its bucket.
      pieces: its pieces; those of a row of the batch follow one another.
      rows: the batch's row of each piece, ascending.
    """

    bucket: int
    pieces: Pieces
    rows: np.ndarray


class Planner:
    """Plans the training batches of a mixture, block by block."""

    def __init__(
        self,
        mixture: Mixture,
        cut: Callable[[np.ndarray], Pieces],
        buckets: Sequence[Bucket],
        window: int,
        seed: int,
    ):
        """Prepares the plan.

        Args:
          mixture: gives the rows of each block.
          cut: returns the pieces of rows with given numbers.
          buckets: rows, source length and target length of the batches of each bucket, the shortest
            first.
          window: number of pieces to choose from when a row is filled.
          seed: seed of the order of batches.
        """
        self._mixture, self._cut, self._buckets = mixture, cut, list(buckets)
        self._window, self._seed = window, seed

    def uses(self, block: int, batch: int) -> list[Use]:
        """Returns how often the rows of each language are in the batches before a position.

        Rows of earlier chapters count if they were drawn, also if they fit no batch.

        Args:
          block: number of a block.
          batch: number of a batch of the block.
        """
        first = block - block % BLOCKS_OF_CHAPTER
        rows = [np.zeros(0, np.int64)]
        for number, batches in zip(range(first, block + 1), self.blocks(first), strict=False):
            pieces = [planned.pieces for planned in batches[: batch if number == block else None]]
            rows += [piece.rows[piece.begins == 0] for piece in pieces]
        return self._mixture.uses(first, np.concatenate(rows))

    def blocks(self, begin: int) -> Iterator[list[PlannedBatch]]:
        """Yields the batches of each block from block `begin` on, without an end."""
        first = begin - begin % BLOCKS_OF_CHAPTER
        while True:
            chapter = _Chapter(self._buckets, self._window)
            for block in range(first, first + BLOCKS_OF_CHAPTER):
                chapter.add(self._cut(self._mixture.block(block)))
                batches = chapter.take(block + 1 == first + BLOCKS_OF_CHAPTER)
                if block >= begin:
                    order = permutation(len(batches), self._seed, 4, block)
                    yield [batches[place] for place in order]
            first += BLOCKS_OF_CHAPTER


class _Chapter:
    """The pieces of a chapter that are in no batch yet."""

    def __init__(self, buckets: list[Bucket], window: int):
        self._buckets, self._window = buckets, window
        self._fillers = [RowFiller(*bucket[1:]) for bucket in buckets]
        self._pieces = [no_pieces() for _ in buckets]
        self._rows: list[list[list[int]]] = [[] for _ in buckets]
        self._added = np.zeros(len(buckets), np.int64)

    def add(self, pieces: Pieces) -> None:
        """Adds the pieces of a block. Pieces that fit no bucket are left out."""
        buckets = bucket_of(pieces.lengths, self._buckets)
        for index, filler in enumerate(self._fillers):
            own = pieces[buckets == index]
            known = self._pieces[index]
            filler.add(np.arange(len(known), len(known) + len(own)), own.lengths)
            self._pieces[index] = known.plus(own)
            self._added[index] += len(own)

    def take(self, is_last: bool) -> list[PlannedBatch]:
        """Returns the batches that are full, or at the end of the chapter all that are left."""
        found = []
        for index, filler in enumerate(self._fillers):
            # The window is shared by the buckets in proportion to their pieces.
            left = self._window * self._added[index] // max(1, self._added.sum())
            rows = self._rows[index] + filler.fill(0 if is_last else int(left))
            size = self._buckets[index][0]
            count = -(-len(rows) // size) if is_last else len(rows) // size
            # Neighboring rows were filled from the same pool: spread them over the batches.
            full = len(rows) if is_last else count * size
            order = permutation(full, index, int(self._added[index]))
            for batch in range(count):
                # At the end, all batches have the same number of rows to within one.
                part = order[full * batch // count : full * (batch + 1) // count]
                found.append(self._planned(index, [rows[place] for place in part]))
            self._rows[index] = rows[full:]
        return found

    def _planned(self, bucket: int, rows: list[list[int]]) -> PlannedBatch:
        places = np.array([place for row in rows for place in row], np.int64)
        of_piece = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        return PlannedBatch(bucket, self._pieces[bucket][places], of_piece)


def in_order(
    pieces: Iterator[Pieces], bucket: Bucket, index: int, window: int
) -> Iterator[PlannedBatch]:
    """Yields batches with each piece once; rows of the last batch may be empty.

    Args:
      pieces: the pieces, in parts.
      bucket: rows, source length and target length of a batch. Longer pieces are left out.
      index: number of the bucket.
      window: number of pieces to choose from when a row is filled.
    """
    chapter = _Chapter([bucket], window)
    for part in pieces:
        chapter.add(part)
        yield from _numbered(chapter.take(False), index)
    yield from _numbered(chapter.take(True), index)


def _numbered(batches: list[PlannedBatch], bucket: int) -> list[PlannedBatch]:
    return [dataclasses.replace(batch, bucket=bucket) for batch in batches]
