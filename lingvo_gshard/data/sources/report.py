"""CleaningReport: counts the rows of a split that were kept and dropped, and says why."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from lingvo_gshard.core.seams import Seam
from lingvo_gshard.data.sources.row import Row

_EXCERPT = 60


@dataclasses.dataclass(frozen=True)
class Limit:
    """The lengths of all rows that a limit was applied to.

    Attributes:
      setting: path of the hyperparameter, such as "input.source_length".
      unit: what is counted, such as "source tokens".
      lengths: length -> number of rows.
    """

    setting: str
    unit: str
    value: int
    lengths: collections.Counter[int]

    @property
    def exceeded(self) -> int:
        """Number of rows that are longer than the limit."""
        return sum(rows for length, rows in self.lengths.items() if length > self.value)


@dataclasses.dataclass
class CleaningReport:
    """Counts what reading and cleaning did to the rows of one split.

    Attributes:
      read: number of rows read, both kept and dropped.
      dropped: reason -> number of rows dropped.
      rewritten: kind of change -> number of texts changed.
      examples: reason -> the first row dropped for this reason: file, line, and what is wrong.
      kept_by_language: language -> number of rows kept.
      dropped_by_language: (language, reason) -> number of rows dropped. Rows that could not be read
        have no language and are not counted here.
      limits: limits of length, with the lengths of the rows that they were applied to.
    """

    split: str = ""
    read: int = 0
    kept: int = 0
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rewritten: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    kept_by_language: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    dropped_by_language: collections.Counter[tuple[str, str]] = dataclasses.field(
        default_factory=collections.Counter
    )
    limits: list[Limit] = dataclasses.field(default_factory=list)

    def drop(self, row: Row, reason: str) -> None:
        """Counts a row that is dropped."""
        self.dropped[reason] += 1
        self.dropped_by_language[row.language, reason] += 1
        if reason not in self.examples:
            text = excerpt(row.source or row.target)
            self.examples[reason] = f"{place(row)}: {text}" if text else place(row)

    def keep(self, rows: Sequence[Row]) -> None:
        """Counts rows that are kept."""
        self.kept += len(rows)
        self.kept_by_language.update(row.language for row in rows)

    def without(self, rows: Iterable[Row], reason: str, limits: Iterable[Limit]) -> CleaningReport:
        """Returns a copy of the report with kept rows counted as dropped.

        Args:
          rows: the rows, counted as kept before.
          reason: why they are dropped.
          limits: limits that some of them may exceed.
        """
        copy = dataclasses.replace(
            self,
            dropped=self.dropped.copy(),
            examples=dict(self.examples),
            kept_by_language=self.kept_by_language.copy(),
            dropped_by_language=self.dropped_by_language.copy(),
            limits=[*self.limits, *limits],
        )
        for row in rows:
            copy.kept -= 1
            copy.kept_by_language[row.language] -= 1
            copy.drop(row, reason)
        copy.kept_by_language = +copy.kept_by_language
        return copy

    def to_table(self) -> list[tuple[str, int]]:
        """Returns (description, number of rows) of each line of a table of the counts."""
        rows = [("read", self.read)]
        rows += [(f"dropped: {reason}", n) for reason, n in sorted(self.dropped.items())]
        rows += [("kept", self.kept)]
        rows += [(reason, n) for reason, n in sorted(self.rewritten.items())]
        return rows

    def reasons(self) -> str:
        """Returns why rows were dropped as text: counts, reasons and an example of each."""
        return "; ".join(
            f"{n:,} dropped: {reason} ({self.examples[reason]})"
            for reason, n in self.dropped.most_common()
        )


# Subject of a report, such as LIMITS -> returns lines about it for the user.
REPORT_NOTES: Seam[Callable[[CleaningReport], list[str]]] = Seam("report_notes")
LIMITS = "limits"


def place(row: Row) -> str:
    """Returns where a row was read, as `file:line`."""
    return f"{row.file}:{row.line}"


def excerpt(text: str) -> str:
    """Returns the beginning of a text, in quotes, on one line."""
    return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…") if text else ""
