"""Shares: which part of the training rows comes from each language and source, step by step.

Nothing is held per row, however many there are: the order within an epoch is a permutation with
random access.

The stream of rows is planned in chapters of some blocks. Within a chapter, pieces that fill no row
yet wait for the next block; at its end, all are placed. So a chapter is a function of the seed and
its number, every process makes the same plan, and a position is a block and a batch.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.batching.packing import RowFiller
from lingvo_gshard.data.batching.permutations import permutation, permuted
from lingvo_gshard.data.batching.table import Group


def temperature_probabilities(counts: Sequence[int], temperature: float) -> np.ndarray:
    """Returns the sampling probability of each language: p_l ~ n_l ** (1 / temperature).

    Source: Arivazhagan et al. 2019, section 4.2, https://arxiv.org/abs/1907.05019.

    Args:
      counts: number of sentences n_l of each language.
      temperature: 1 keeps the proportions of the data; infinity makes all languages equal.

    Raises:
      UserError: the temperature or a count is below 1.
    """
    if not temperature >= 1:
        raise UserError(f"temperature must be at least 1, not {temperature}")
    amounts = np.asarray(counts, np.float64)
    if amounts.size == 0 or amounts.min() < 1:
        raise UserError("Every language needs at least one sentence to be sampled from")
    # Computed through logarithms so that small exponents cannot overflow.
    weights = np.exp(np.log(amounts / amounts.max()) / temperature)
    return weights / weights.sum()


class Shares(Configurable):
    """Computes the share of each language and source in the training rows of a step.

    A language of n rows has a share in proportion to weight * min(n, most_rows) ** (1 / T), where
    T is the temperature (Arivazhagan et al. 2019, section 4.2, https://arxiv.org/abs/1907.05019).
    The sources of a language share its part in proportion to weight * rows.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "temperature",
            1.0,
            "Languages are sampled as n ** (1 / temperature): 1 keeps the proportions of the data; "
            "the larger, the more alike the languages.",
            minimum=1,
        )
        p.define(
            "temperature_schedule",
            (),
            "Pairs (step, temperature) in place of `temperature`, the steps ascending, such as "
            "((0, 1.0), (10000, 5.0)). Between two steps the temperature changes linearly; before "
            "the first and after the last it stays.",
        )
        p.define(
            "language_weights",
            (),
            'Pairs (language, weight), such as (("de", 2.0),); 1 for all others. 0 leaves a '
            "language out.",
        )
        p.define(
            "source_weights", (), "Pairs (source, weight); 1 for all others. 0 leaves a source out."
        )
        p.define(
            "most_rows",
            0,
            "Largest number of rows that a language counts for; 0: no limit.",
            minimum=0,
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        pairs = self.p.temperature_schedule or ((0, self.p.temperature),)
        self._temperature = _Piecewise.of("temperature_schedule", pairs)
        self._weights = {
            kind: _weights(f"{kind}_weights", self.p.get(f"{kind}_weights"))
            for kind in ("language", "source")
        }

    @property
    def last_change(self) -> float:
        """The last step that changes the shares."""
        return self._temperature.steps[-1]

    def used(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups whose share is not 0.

        Raises:
          UserError: a weight is of a language or a source that is not there, or no group is left.
        """
        for kind, weights in self._weights.items():
            there = {getattr(group, kind) for group in groups}
            for name in weights:
                if name not in there:
                    raise UserError(
                        f"{kind}_weights: the prepared data has no {kind} {name!r}. "
                        f"{names.nearest(name, there)}"
                    )
        left = [group for group in groups if all(self._weight(group))]
        if not left:
            raise UserError("language_weights and source_weights leave out all rows")
        return left

    def at(self, step: float, groups: Sequence[Group]) -> np.ndarray:
        """Returns the share of each group at a step; the shares have a sum of 1.

        Args:
          step: number of the step.
          groups: the groups that `used` returns.
        """
        rows = np.array([group.rows for group in groups], np.float64)
        weights = np.array([self._weight(group) for group in groups])
        _, language = np.unique([group.language for group in groups], return_inverse=True)
        of_language = np.bincount(language, rows)
        counted = np.minimum(of_language, self.p.most_rows or math.inf)
        weight_of_language = np.zeros(len(counted))
        weight_of_language[language] = weights[:, 0]
        # Through logarithms, so that no temperature overflows.
        logs = np.log(weight_of_language) + np.log(counted) / self._temperature.at(step)
        parts = np.exp(logs - logs.max())
        within = weights[:, 1] * rows
        shares = parts[language] / parts.sum() * within / np.bincount(language, within)[language]
        return shares

    def _weight(self, group: Group) -> tuple[float, float]:
        """Returns the weights of a group's language and of its source."""
        of_language, of_source = self._weights["language"], self._weights["source"]
        return of_language.get(group.language, 1.0), of_source.get(group.source, 1.0)


@dataclasses.dataclass(frozen=True)
class _Piecewise:
    """A value that changes linearly between given steps."""

    steps: list[float]
    values: list[float]

    @classmethod
    def of(cls, name: str, pairs: object) -> _Piecewise:
        """Returns the schedule of a hyperparameter; ValueError if it is none."""
        found = [(float(step), float(value)) for step, value in _pairs(name, pairs)]
        steps = [step for step, _ in found]
        if not found or any(b <= a for a, b in zip(steps, steps[1:], strict=False)):
            raise UserError(
                f"{name} is {pairs!r}; pairs (step, temperature) with ascending steps were expected"
            )
        if low := [value for _, value in found if not value >= 1]:
            raise UserError(f"{name} is {pairs!r}; {low[0]} is below 1")
        return cls(steps, [value for _, value in found])

    def at(self, step: float) -> float:
        """Returns the value at a step."""
        after = bisect.bisect_right(self.steps, step)
        if after in (0, len(self.steps)):
            return self.values[min(after, len(self.steps) - 1)]
        begin, end = self.steps[after - 1 : after + 1]
        share = (step - begin) / (end - begin)
        return (1 - share) * self.values[after - 1] + share * self.values[after]


def _weights(name: str, pairs: object) -> Mapping[str, float]:
    found = {str(key): float(value) for key, value in _pairs(name, pairs)}
    for key, value in found.items():
        if not 0 <= value < math.inf:
            raise UserError(f"{name} is {pairs!r}; the weight of {key!r} must be 0 or more")
    return found


def _pairs(name: str, pairs: Any) -> list[tuple[Any, float]]:
    """Returns the value of a hyperparameter as a list of pairs; ValueError if it is none."""
    try:
        return [(key, float(value)) for key, value in pairs]
    except (TypeError, ValueError):
        raise UserError(f"{name} is {pairs!r}; a tuple of pairs was expected") from None


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


_UNITS = 1 << 32
# The order of an epoch is held for mixtures with at most so many rows, in 16 MB. Computing all of
# it once is faster than computing a few places for each of a hundred languages in every block.
_MOST_ROWS_HELD = 1 << 20


@dataclasses.dataclass(frozen=True)
class Use:
    """Counts how often training has read the rows of a language.

    Attributes:
      language: the language.
      rows: number of its rows.
      read: number of rows read so far, repeats included.
    """

    language: str
    rows: int
    read: int

    @property
    def epochs(self) -> float:
        """The number of times that each row was read, on average."""
        return self.read / self.rows


class Mixture:
    """An endless stream of row numbers in blocks of about `block_rows`.

    A group has its share of every block, to within one row. It goes through all its rows in random
    order before any is repeated.

    Attributes:
      groups: the groups of rows that are used.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        shares: Shares,
        block_rows: int,
        seed: int,
        steps_of: Callable[[np.ndarray], float],
    ):
        """Prepares the stream.

        Args:
          groups: all groups.
          shares: the part of each group in the rows of a step.
          block_rows: rows of a block.
          seed: seed of all orders.
          steps_of: estimates the steps that train on a block, from the shares of the groups that
            `shares.used` returns.
        """
        self.groups = shares.used(groups)
        self._shares, self._block_rows, self._seed = shares, block_rows, seed
        self._steps_of = steps_of
        phases = 2 * permutation(len(self.groups), seed, 1) + 1
        # A small group has one row in some blocks; phases spread these over the stream.
        fractions = phases * (_UNITS // (2 * len(self.groups)))
        # Before each block: rows drawn from each group, and fractions of a row. Both are
        # integers, so that positions far into the stream are exact.
        self._positions = [(np.zeros(len(self.groups), np.int64), fractions.astype(np.int64))]
        self._units: list[np.ndarray] = []
        self._plan_changes()
        self._holds_orders = sum(group.rows for group in self.groups) <= _MOST_ROWS_HELD
        self._order = functools.lru_cache(2 * len(self.groups))(self._order_of_epoch)

    def block(self, number: int) -> np.ndarray:
        """Returns the row numbers of one block, shuffled."""
        begins, ends = self._drawn(number), self._drawn(number + 1)
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

    def uses(self, number: int, more: np.ndarray) -> list[Use]:
        """Returns how often the rows of each language are read.

        Args:
          number: all rows of the blocks before this one are counted.
          more: numbers of further rows.
        """
        begins = np.array([group.begin for group in self.groups])
        groups = np.searchsorted(begins, more, side="right") - 1
        counts = self._drawn(number) + np.bincount(groups, minlength=len(begins))
        read: dict[str, int] = {}
        rows: dict[str, int] = {}
        for group, count in zip(self.groups, counts.tolist(), strict=True):
            read[group.language] = read.get(group.language, 0) + count
            rows[group.language] = rows.get(group.language, 0) + group.rows
        return [Use(language, rows[language], read[language]) for language in sorted(read)]

    def _drawn(self, block: int) -> np.ndarray:
        """Returns the rows drawn from each group before a block, int64."""
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
                    whole.tolist(), fraction.tolist(), self._units[-1].tolist(), strict=True
                )
            ],
            np.int64,
        )

    def _plan_changes(self) -> None:
        """Computes the shares of each block until they stay as they are."""
        step = 0.0
        while True:
            shares = self._shares.at(step, self.groups)
            units = np.maximum(1, np.rint(shares * _UNITS)).astype(np.int64)
            self._units.append(units)
            if step >= self._shares.last_change:
                return
            whole, fraction = self._positions[-1]
            sums = fraction + self._block_rows * units
            self._positions.append((whole + sums // _UNITS, sums % _UNITS))
            step += self._steps_of(shares)


# A chapter's last rows and batches are not as full as others: with 16 blocks of 8,192 pairs, that
# costs 0.3% of the positions. Resuming plans one chapter again, which takes 2 seconds at most.
BLOCKS_OF_CHAPTER = 16


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """A batch without its tokens.

    Attributes:
      bucket: number of its bucket.
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
