"""Plans batches: which rows each has, from the shares of languages, and their places in it.

Nothing is held per row, however many there are: the order within an epoch is a permutation with
random access.

The stream of rows is planned in chapters of some blocks. Within a chapter, pieces that fill no row
yet wait for the next block; at its end, all are placed. So a chapter is a function of the seed and
its number, every process makes the same plan, and a position is a block and a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.data.batching.packing import RowFiller
from lingvo_gshard.data.batching.permutations import permutation, permuted
from lingvo_gshard.data.batching.table import Group

Bucket = tuple[int, int, int]


def language_shares(
    groups: Sequence[Group],
    temperature: float,
    weights: np.ndarray | None = None,
    most_rows: float = math.inf,
) -> np.ndarray:
    """Returns the share of each group in the training rows; the shares have a sum of 1.

    A language of n rows has a share in proportion to weight * min(n, most_rows) ** (1 / T), where
    T is the temperature (Arivazhagan et al. 2019, section 4.2, https://arxiv.org/abs/1907.05019).
    The groups of a language share its part in proportion to weight * rows.

    Args:
      groups: rows of a language each, from one source.
      temperature: 1 keeps the proportions of the data; infinity makes all languages equal.
      weights: [N,2], of each group's language, and of its source; None: all are 1.
      most_rows: the largest number of rows that a language counts for.
    """
    rows = np.array([group.rows for group in groups], np.float64)
    weights = np.ones((len(groups), 2)) if weights is None else weights
    _, language = np.unique([group.language for group in groups], return_inverse=True)
    of_language = np.bincount(language, rows)
    counted = np.minimum(of_language, most_rows)
    weight_of_language = np.zeros(len(counted))
    weight_of_language[language] = weights[:, 0]
    # Through logarithms, so that no temperature overflows.
    logs = np.log(weight_of_language) + np.log(counted) / temperature
    parts = np.exp(logs - logs.max())
    within = weights[:, 1] * rows
    return parts[language] / parts.sum() * within / np.bincount(language, within)[language]


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


def whole_rows(rows: np.ndarray, lengths: np.ndarray) -> Pieces:
    """Returns one piece for each row."""
    return Pieces(rows, np.zeros(len(rows), np.int64), lengths)


def windows(rows: np.ndarray, lengths: np.ndarray, length: int) -> Pieces:
    """Returns rows cut into windows of `length` target tokens; the last of a row may be shorter.

    Args:
      lengths: source and target tokens of each row.
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


_UNITS = 1 << 32
# The order of an epoch is held for mixtures with at most so many rows, in 16 MB. Computing all of
# it once is faster than computing a few places for each of a hundred languages in every block.
_MOST_ROWS_HELD = 1 << 20


class Mixture:
    """An endless stream of row numbers in blocks of about `block_rows`.

    A group has its share of every block, to within one row. It goes through all its rows in random
    order before any is repeated.
    """

    def __init__(
        self, groups: Sequence[Group], shares: Sequence[np.ndarray], block_rows: int, seed: int
    ):
        """Prepares the stream.

        Args:
          shares: the share of each group in block 0, 1 and so on. Later blocks have the last ones.
        """
        self.groups, self._block_rows, self._seed = groups, block_rows, seed
        phases = 2 * permutation(len(self.groups), seed, 1) + 1
        # A small group has one row in some blocks; phases spread these over the stream.
        fractions = phases * (_UNITS // (2 * len(self.groups)))
        # Before each block: rows drawn from each group, and fractions of a row. Both are
        # integers, so that positions far into the stream are exact.
        self._positions = [(np.zeros(len(self.groups), np.int64), fractions.astype(np.int64))]
        *changing, self._units = [
            np.maximum(1, np.rint(each * _UNITS)).astype(np.int64) for each in shares
        ]
        for units in changing:
            whole, fraction = self._positions[-1]
            sums = fraction + block_rows * units
            self._positions.append((whole + sums // _UNITS, sums % _UNITS))
        self._holds_orders = sum(group.rows for group in self.groups) <= _MOST_ROWS_HELD
        self._order = functools.lru_cache(2 * len(self.groups))(self._order_of_epoch)

    def block(self, number: int) -> np.ndarray:
        """Returns the row numbers of one block, shuffled."""
        begins, ends = self.drawn(number), self.drawn(number + 1)
        parts = []
        for index in np.flatnonzero(ends > begins).tolist():
            group, begin, end = self.groups[index], int(begins[index]), int(ends[index])
            while begin < end:
                epoch, offset = divmod(begin, group.rows)
                places = np.arange(offset, min(group.rows, offset + end - begin))
                if self._holds_orders:
                    order = self._order(index, epoch)[places]
                else:
                    order = permuted(places, group.rows, self._seed, 3, index, epoch)
                parts.append(group.begin + order)
                begin += len(places)
        rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return rows[permutation(len(rows), self._seed, 2, number)]

    def _order_of_epoch(self, index: int, epoch: int) -> np.ndarray:
        rows = self.groups[index].rows
        return permuted(np.arange(rows), rows, self._seed, 3, index, epoch)

    def drawn(self, block: int) -> np.ndarray:
        """Returns the number of rows drawn from each group before a block, int64."""
        last = len(self._positions) - 1
        if block <= last:
            return self._positions[block][0]
        whole, fraction = self._positions[last]
        count = (block - last) * self._block_rows
        # Python's integers, which do not overflow.
        return np.array(
            [
                w + (f + count * u) // _UNITS
                for w, f, u in zip(
                    whole.tolist(), fraction.tolist(), self._units.tolist(), strict=True
                )
            ],
            np.int64,
        )


# A chapter's last rows and batches are not as full as others: with 16 blocks of 8,192 pairs, that
# costs 0.3% of the positions. Resuming plans one chapter again, which takes 2 seconds at most.
BLOCKS_OF_CHAPTER = 16


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """A batch without its tokens.

    Attributes:
      pieces: its pieces, in the order of the batch's rows.
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
        seed: int,
        window: int,
        most_segments: int = 0,
    ):
        """Prepares the plan.

        Args:
          mixture: gives the rows of each block.
          cut: returns the pieces of rows with given numbers.
          buckets: rows, source length and target length of the batches of each bucket, the shortest
            first.
          seed: seed of the order of batches.
          window: number of pieces to choose from when a row is filled.
          most_segments: the most pieces of a row; 0 for as many as fit.
        """
        self.mixture, self._cut, self._buckets = mixture, cut, list(buckets)
        self._packing, self._seed = (window, most_segments), seed

    def blocks(self, begin: int) -> Iterator[list[PlannedBatch]]:
        """Yields the batches of each block from block `begin` on, without an end."""
        first = begin - begin % BLOCKS_OF_CHAPTER
        while True:
            chapter = _Chapter(self._buckets, *self._packing)
            for block in range(first, first + BLOCKS_OF_CHAPTER):
                chapter.add(self._cut(self.mixture.block(block)))
                batches = chapter.take(block + 1 == first + BLOCKS_OF_CHAPTER)
                if block >= begin:
                    order = permutation(len(batches), self._seed, 4, block)
                    yield [batches[place] for place in order]
            first += BLOCKS_OF_CHAPTER


class _Chapter:
    """The pieces of a chapter that are in no batch yet."""

    def __init__(self, buckets: list[Bucket], window: int, most_segments: int):
        self._buckets, self._window = buckets, window
        self._fillers = [RowFiller(*bucket[1:], most_segments) for bucket in buckets]
        self._pieces = [whole_rows(np.zeros(0, np.int64), np.zeros((0, 2), np.int64))] * len(
            buckets
        )
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
    pieces: Iterator[Pieces], bucket: Bucket, index: int, window: int, most_segments: int = 0
) -> Iterator[PlannedBatch]:
    """Yields batches with each piece once; rows of the last batch may be empty.

    Args:
      bucket: rows, source length and target length of a batch. Longer pieces are left out.
      window: number of pieces to choose from when a row is filled.
      most_segments: the most pieces of a row; 0 for as many as fit.
    """
    chapter = _Chapter([bucket], window, most_segments)
    for part in pieces:
        chapter.add(part)
        yield from _numbered(chapter.take(False), index)
    yield from _numbered(chapter.take(True), index)


def _numbered(batches: list[PlannedBatch], bucket: int) -> list[PlannedBatch]:
    return [dataclasses.replace(batch, bucket=bucket) for batch in batches]
