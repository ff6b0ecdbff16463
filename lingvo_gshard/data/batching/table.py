"""Table: the tokenized rows of a split, known by their numbers, in memory or on disk."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lingvo_gshard.data.batching.packing import Tokens


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of a language from one source; their numbers are consecutive.

    Attributes:
      begin: number of the first row.
      tokens: source and target tokens of all rows.
    """

    language: str
    source: str
    begin: int
    rows: int
    tokens: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Records:
    """The tokens of some rows.

    Attributes:
      rows: numbers of the rows, ascending; None for all rows of a table.
      targets: the targets. A row that could not be read has no tokens on either side.
      marks: a mark of each target token, as an input defines them; None without marks.
    """

    rows: np.ndarray | None
    sources: Tokens
    targets: Tokens
    marks: Tokens | None = None

    def places_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the place of each row among these records; -1 if it is not there."""
        if self.rows is None:
            return rows
        if not len(self.rows):
            return np.full(len(rows), -1)
        place = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return np.where(self.rows[place] == rows, place, -1)


class Table(Protocol):
    """The tokenized rows of a split, numbered from 0.

    Attributes:
      groups: the rows of each language and source, in the order of their numbers.
    """

    groups: list[Group]

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64 [N,2], source and target tokens of rows.

        Args:
          rows: int64 [N], numbers of rows in any order.
        """
        ...

    def read(self, rows: np.ndarray) -> Records:
        """Returns the records of rows, and of others where they are at hand.

        Args:
          rows: int64, numbers of rows in any order; they may repeat.
        """
        ...


class MemoryTable:
    """Rows in memory.

    Attributes:
      sources: the source of each row; without tokens if rows have none.
      marks: a mark of each target token; None without marks.
      groups: the rows of each language, languages sorted.
    """

    def __init__(
        self,
        sources: Tokens,
        targets: Tokens,
        languages: Sequence[str],
        marks: Tokens | None = None,
    ):
        """Numbers the rows by language. Rows of a language keep their order."""
        names, numbers = np.unique(np.asarray(languages, np.str_), return_inverse=True)
        order = np.argsort(numbers, kind="stable")
        self.sources, self.targets = sources.take(order), targets.take(order)
        self.marks = None if marks is None else marks.take(order)
        lengths = self.lengths_of(np.arange(len(order)))
        ends = np.cumsum(np.bincount(numbers, minlength=len(names))).tolist()
        self.groups = [
            Group(name, "", begin, end - begin, tuple(lengths[begin:end].sum(axis=0).tolist()))
            for name, begin, end in zip(names.tolist(), [0, *ends], ends, strict=False)
        ]

    def __len__(self) -> int:
        return len(self.targets)

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64 [N,2], source and target tokens of rows."""
        return np.stack([side.lengths_of(rows) for side in (self.sources, self.targets)], axis=1)

    def read(self, rows: np.ndarray) -> Records:
        """Returns the records of all rows, without copying any."""
        del rows
        return Records(None, self.sources, self.targets, self.marks)

    def digest(self) -> str:
        """Returns a digest of all tokens, marks and languages."""
        groups = [(group.language, group.rows) for group in self.groups]
        digest = hashlib.sha256(repr(groups).encode())
        for side in filter(None, (self.sources, self.targets, self.marks)):
            digest.update(side.ids.tobytes() + side.offsets.tobytes())
        return digest.hexdigest()
