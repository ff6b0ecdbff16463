"""Cleaning of documents: normalizes lines, drops useless documents, and counts both."""

from __future__ import annotations

from collections.abc import Iterable

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.data.sources.cleaning import DUPLICATE, CleaningReport, Normalizer
from lingvo_gshard.data.sources.row import Row

EMPTY = "empty"
SHORT = "too short"
LONG = "too long"


class DocumentCleaner(Configurable):
    """Normalizes the lines of documents; drops short, long and repeated documents."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("min_characters", 1, "Smallest number of characters of a document.", minimum=1)
        p.define(
            "max_characters",
            0,
            "Largest number of characters of a document; 0: no limit.",
            minimum=0,
        )
        p.define("drop_duplicates", True, "Whether to drop repeated documents.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        most = self.p.max_characters
        if self.p.min_characters > (most or self.p.min_characters):
            raise ValueError(
                "input.cleaning.min_characters must be at most max_characters, not "
                f"{self.p.min_characters} with max_characters {most}"
            )

    def clean(self, rows: Iterable[Row], split: str) -> tuple[list[Row], CleaningReport]:
        """Returns the documents kept and the report.

        Each line is normalized. Repeated blank lines become one, and those at the ends are removed.
        Documents of dev and test are dropped only if they are empty.
        """
        report = CleaningReport(split)
        normal = Normalizer(report.rewritten)
        seen: set[str] = set()
        kept = []
        for row in rows:
            report.read += 1
            text = _joined(map(normal, row.target.split("\n")))
            reason = self._reason(text, seen) if split == "train" else "" if text else EMPTY
            if reason:
                report.dropped[reason] += 1
            else:
                kept.append(row._replace(target=text))
        report.kept = len(kept)
        return kept, report

    def _reason(self, text: str, seen: set[str]) -> str:
        if not text:
            return EMPTY
        if len(text) < self.p.min_characters:
            return SHORT
        if self.p.max_characters and len(text) > self.p.max_characters:
            return LONG
        if self.p.drop_duplicates:
            if text in seen:
                return DUPLICATE
            seen.add(text)
        return ""


def _joined(lines: Iterable[str]) -> str:
    """Joins lines to one text with no two blank lines in a row and none at the ends."""
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    return "\n".join(kept).rstrip("\n")
