"""Cleaning of sentence pairs: normalizes rows, drops useless training rows, and counts both."""

import collections
import dataclasses
import unicodedata
from collections.abc import Iterable

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.data.sources.row import Row

# Persian, Hindi and other languages spell words with these two joiners.
_KEPT_FORMATS = "\u200c\u200d"

EMPTY = "a side is empty"
IDENTICAL = "both sides are identical"
SHORT = "a side is too short"
LONG = "a side is too long"
RATIO = "the sides' lengths are too unlike"
DUPLICATE = "a duplicate"
REWRITTEN_NFC = "rewritten in Unicode NFC"
REWRITTEN_CONTROL = "control characters taken out"
REWRITTEN_SPACE = "white space made single"


@dataclasses.dataclass
class CleaningReport:
    """Counts what cleaning did to the rows of one split.

    Attributes:
      split: name of the split.
      read: number of rows read: those kept and those dropped.
      kept: number of rows kept.
      dropped: reason -> number of rows dropped.
      rewritten: kind of change -> number of texts changed.
      examples: messages about rows that the reader could not read.
    """

    split: str = ""
    read: int = 0
    kept: int = 0
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rewritten: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: list[str] = dataclasses.field(default_factory=list)

    def to_table(self) -> list[tuple[str, int]]:
        """Returns (description, number of rows) of each line of a table of the counts."""
        rows = [("read", self.read)]
        rows += [(f"dropped: {reason}", n) for reason, n in sorted(self.dropped.items())]
        rows += [("kept", self.kept)]
        rows += [(reason, n) for reason, n in sorted(self.rewritten.items())]
        return rows


class Cleaner(Configurable):
    """Normalizes sentence pairs and drops those that would only add noise to training."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("min_characters", 1, "Smallest number of characters of a side.", minimum=1)
        p.define("max_characters", 1000, "Largest number of characters of a side.", minimum=1)
        p.define(
            "max_length_ratio",
            10.0,
            "Largest ratio of the sides' lengths in characters. (Chinese is often 4 times shorter "
            "than English.)",
            minimum=1,
        )
        p.define(
            "drop_duplicates", True, "Whether to drop repetitions of (language, source, target)."
        )
        p.define("drop_identical", True, "Whether to drop rows with equal sides, ignoring case.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if self.p.min_characters > self.p.max_characters:
            raise ValueError(
                "input.cleaning.min_characters must be at most max_characters, not "
                f"{self.p.min_characters} with max_characters {self.p.max_characters}"
            )

    def clean(self, rows: Iterable[Row], split: str) -> tuple[list[Row], CleaningReport]:
        """Returns the rows kept and the report.

        Rows of dev and test are normalized, but dropped only if a side is empty, so that scores are
        of the test set as it was given.
        """
        report = CleaningReport(split)
        normal = Normalizer(report.rewritten)
        seen: set[tuple[str, str, str]] = set()
        kept = []
        for row in rows:
            report.read += 1
            row = row._replace(source=normal(row.source), target=normal(row.target))
            reason = self._reason(row, seen) if split == "train" else _empty(row)
            if reason:
                report.dropped[reason] += 1
            else:
                kept.append(row)
        report.kept = len(kept)
        return kept, report

    def _reason(self, row: Row, seen: set[tuple[str, str, str]]) -> str:
        short, long = sorted((len(row.source), len(row.target)))
        if not short:
            return EMPTY
        if short < self.p.min_characters:
            return SHORT
        if long > self.p.max_characters:
            return LONG
        if long > self.p.max_length_ratio * short:
            return RATIO
        if self.p.drop_identical and row.source.casefold() == row.target.casefold():
            return IDENTICAL
        if self.p.drop_duplicates:
            if row[:3] in seen:
                return DUPLICATE
            seen.add(row[:3])
        return ""


class Normalizer:
    """Converts lines to the normal form that vocabularies and models see, and counts changes.

    The normal form is Unicode NFC (https://unicode.org/reports/tr15/) without control characters,
    without format characters other than joiners, and without leading, trailing or repeated white
    space.
    """

    def __init__(self, counts: collections.Counter[str] | None = None):
        self._counts = collections.Counter() if counts is None else counts

    def __call__(self, text: str) -> str:
        """Returns the normal form of one line."""
        if not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
            self._counts[REWRITTEN_NFC] += 1
        # U+0020 is the only white space that isprintable accepts.
        if text.isprintable() and "  " not in text and text == text.strip():
            return text
        visible = "".join(map(_visible, text))
        single = " ".join(visible.split())
        if visible != text:
            self._counts[REWRITTEN_CONTROL] += 1
        if single != visible:
            self._counts[REWRITTEN_SPACE] += 1
        return single


def _visible(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Cc":
        return " "
    return "" if category == "Cf" and character not in _KEPT_FORMATS else character


def _empty(row: Row) -> str:
    return "" if row.source and row.target else EMPTY


def with_dropped(report: CleaningReport, reason: str, count: int) -> CleaningReport:
    """Returns a copy of a report with `count` rows moved from kept to dropped."""
    dropped = report.dropped + collections.Counter({reason: count})
    return dataclasses.replace(report, kept=report.kept - count, dropped=dropped)
