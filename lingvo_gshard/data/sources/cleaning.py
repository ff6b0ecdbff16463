"""Cleaning: what is rewritten in every row, and which training rows are left out, all counted."""

import collections
import dataclasses
import unicodedata
from collections.abc import Iterable

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.data.sources.row import Row

# The two joiners are format characters that Persian, Hindi and others spell with.
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
    """What cleaning did to one split: rows by reason. read == kept + the sum of dropped."""

    split: str = ""
    read: int = 0
    kept: int = 0
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rewritten: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: list[str] = dataclasses.field(default_factory=list)

    def to_table(self) -> list[tuple[str, int]]:
        """Returns (what, rows) for a table: read, dropped by reason, kept, rewritten by reason."""
        rows = [("read", self.read)]
        rows += [(f"dropped: {reason}", n) for reason, n in sorted(self.dropped.items())]
        rows += [("kept", self.kept)]
        rows += [(reason, n) for reason, n in sorted(self.rewritten.items())]
        return rows


class Cleaner(Configurable):
    """Rewrites rows in one normal form and drops those that would only teach noise."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("min_characters", 1, "Least characters of a side.")
        p.define("max_characters", 1000, "Most characters of a side.")
        p.define(
            "max_length_ratio",
            10.0,
            "Most times that one side may be longer than the other, in characters. (Chinese is "
            "often 4 times shorter than English.)",
        )
        p.define("drop_duplicates", True, "Whether a repeated (language, source, target) goes.")
        p.define("drop_identical", True, "Whether a row goes whose sides differ in case at most.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if not 1 <= self.p.min_characters <= self.p.max_characters:
            raise ValueError(
                "input.cleaning.min_characters must be at least 1 and at most max_characters, not "
                f"{self.p.min_characters} with max_characters {self.p.max_characters}"
            )
        if self.p.max_length_ratio < 1:
            raise ValueError(
                f"input.cleaning.max_length_ratio must be at least 1, not {self.p.max_length_ratio}"
            )

    def clean(self, rows: Iterable[Row], split: str) -> tuple[list[Row], CleaningReport]:
        """Returns the rows kept and the report.

        Held-out rows (any split but train) are only rewritten, and dropped only when a side is
        empty: scores are of the test set as given.
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
    """Brings a line to the form that vocabularies and models see; counts what it had to rewrite.

    Unicode NFC (https://unicode.org/reports/tr15/); control and format characters other than the
    joiners taken out; white space single, and none at the ends.
    """

    def __init__(self, counts: collections.Counter[str] | None = None):
        self._counts = collections.Counter() if counts is None else counts

    def __call__(self, text: str) -> str:
        """Returns the normal form of one line."""
        if not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
            self._counts[REWRITTEN_NFC] += 1
        # Of all white space only U+0020 is printable.
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
    """Returns a copy of a report in which `count` of the kept rows are dropped after all."""
    dropped = report.dropped + collections.Counter({reason: count})
    return dataclasses.replace(report, kept=report.kept - count, dropped=dropped)
