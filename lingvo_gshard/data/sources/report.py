"""CleaningReport: counts the rows of a split that were kept and dropped, and says why."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from lingvo_gshard.data.sources.row import Row

_EXCERPT = 60
_SHARES = (0.99, 0.999, 1.0)
# Batches and buffers of these lengths suit all kinds of devices.
_MULTIPLE = 8
_COUNTERS = ("dropped", "rewritten", "kept_by_language", "dropped_by_language")


@dataclasses.dataclass(frozen=True)
class Limit:
    """The lengths of all rows that a limit was applied to.

    Attributes:
      setting: path of the hyperparameter, such as "input.source_length".
      unit: what is counted, such as "source tokens".
      value: the limit.
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

    def advice(self) -> str:
        """Returns how long rows are, and the value of the setting that keeps more of them."""
        half, most, nearly_all = (self._within(share) for share in (0.5, 0.9, 0.99))
        return (
            f"{_rows(self.exceeded)} more {self.unit} than {self.setting} = {self.value:,}. Of "
            f"{self.lengths.total():,} rows, half have at most {half:,}, 90% at most {most:,}, "
            f"99% at most {nearly_all:,}; the longest has {max(self.lengths):,}. {self._remedy()}"
        )

    def _remedy(self) -> str:
        kept = 1 - self.exceeded / self.lengths.total()
        share = next(share for share in _SHARES if share > kept)
        value = -(-self._within(share) // _MULTIPLE) * _MULTIPLE
        kept_then = "all" if value >= max(self.lengths) else f"{100 * share:g}% of them"
        return f"{self.setting} = {value} keeps {kept_then}."

    def _within(self, share: float) -> int:
        """Returns the least length that at least this share of rows does not exceed."""
        rank, seen = math.ceil(share * (self.lengths.total() - 1)), 0
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            if seen > rank:
                break
        return length


@dataclasses.dataclass
class CleaningReport:
    """Counts what reading and cleaning did to the rows of one split.

    Attributes:
      split: name of the split.
      read: number of rows read, both kept and dropped.
      kept: number of rows kept.
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

    def merge(self, other: CleaningReport) -> None:
        """Adds the counts of another part of the same split.

        An example that is already there stays. The examples therefore depend on the order of
        merging; the counts do not.
        """
        self.read += other.read
        self.kept += other.kept
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        self.examples = other.examples | self.examples
        merged = {limit.setting: limit for limit in self.limits}
        for limit in other.limits:
            before = merged.get(limit.setting)
            lengths = limit.lengths + before.lengths if before else limit.lengths
            merged[limit.setting] = dataclasses.replace(limit, lengths=lengths)
        self.limits = list(merged.values())

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

    def notes(self) -> list[str]:
        """Returns lines about languages and lengths, to be printed below the table."""
        lines = language_notes(self.kept_by_language)
        named = [language for language, _ in self.kept_by_language.most_common() if language]
        lines += [note for language in named if (note := self._loss(language))]
        gone = {language for language, _ in self.dropped_by_language} - self.kept_by_language.keys()
        lines += [self._loss(language) for language in sorted(gone)]
        return lines + self.advice()

    def advice(self) -> list[str]:
        """Returns a line about each limit that rows exceed."""
        return [limit.advice() for limit in self.limits if limit.exceeded]

    def _loss(self, language: str) -> str:
        reasons = {r: n for (code, r), n in self.dropped_by_language.items() if code == language}
        total = sum(reasons.values()) + self.kept_by_language[language]
        return loss_note(language or "the text", reasons, total)


def language_notes(kept: collections.Counter[str]) -> list[str]:
    """Returns a line with the rows kept of each language, if there are several.

    Args:
      kept: language -> number of rows kept; "" if the language is not known.
    """
    named = [(language, rows) for language, rows in kept.most_common() if language]
    if len(named) < 2:
        return []
    text = ", ".join(f"{language} {rows:,}" for language, rows in named)
    return [f"{len(named)} languages: {text}"]


def loss_note(language: str, dropped: Mapping[str, int], rows: int) -> str:
    """Returns a warning if more than half of a language's rows were dropped, else "".

    Args:
      language: the language.
      dropped: reason -> number of rows dropped.
      rows: number of rows, dropped or not.
    """
    lost = sum(dropped.values())
    if 2 * lost <= rows:
        return ""
    reason, most = max(dropped.items(), key=lambda item: item[1])
    return f"Warning: {language} lost {lost:,} of {rows:,} rows, {most:,} because of: {reason}"


def place(row: Row) -> str:
    """Returns where a row was read, as `file:line`."""
    return f"{row.file}:{row.line}"


def excerpt(text: str) -> str:
    """Returns the beginning of a text, in quotes, on one line."""
    return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…") if text else ""


def _rows(count: int) -> str:
    return f"{count:,} row has" if count == 1 else f"{count:,} rows have"
