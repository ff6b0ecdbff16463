"""Mixture: the endless order of training rows, in blocks that are computed without those before.

Nothing is held per row, however many there are: the order within an epoch is a permutation with
random access.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.data.batching.permutations import permutation, permuted
from lingvo_gshard.data.prepared.planning.shares import Shares
from lingvo_gshard.data.prepared.table import Group

_UNITS = 1 << 32


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
          steps_of: estimates the steps that train on a block in which the groups of
            `shares.used` have given shares.
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

    def block(self, number: int) -> np.ndarray:
        """Returns the row numbers of one block, shuffled."""
        begins, ends = self._drawn(number), self._drawn(number + 1)
        parts = []
        for index in np.flatnonzero(ends > begins).tolist():
            group, begin, end = self.groups[index], int(begins[index]), int(ends[index])
            while begin < end:
                epoch, offset = divmod(begin, group.rows)
                places = np.arange(offset, min(group.rows, offset + end - begin))
                order = permuted(places, group.rows, self._seed, 3, index, epoch)
                parts.append(group.begin + order)
                begin += len(places)
        rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return rows[permutation(len(rows), self._seed, 2, number)]

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

    def shares_of(self, number: int) -> np.ndarray:
        """Returns the share of each group in a block."""
        return self._units[min(number, len(self._units) - 1)] / _UNITS

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
        """Computes the blocks in which shares change, and the shares after them."""
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
