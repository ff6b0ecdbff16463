"""Cleaning of documents: normalizes lines, drops useless documents, and counts both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.data.observer import Observer, SilentObserver
from lingvo_gshard.data.sources.cleaning import DUPLICATE, Normalizer
from lingvo_gshard.data.sources.report import CleaningReport, Limit
from lingvo_gshard.data.sources.row import Row

EMPTY = "empty"
SHORT = "too short"
LONG = "too long"

_DOCUMENTS_BETWEEN_UPDATES = 1024


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

    def clean(
        self, rows: Sequence[Row], split: str, observer: Observer | None = None
    ) -> tuple[list[Row], CleaningReport]:
        """Returns the documents kept and the report.

        Each line is normalized. Repeated blank lines become one, and those at the ends are removed.
        Documents of dev and test are dropped only if they are empty.

        Args:
          rows: the documents.
          split: the split they belong to.
          observer: is told how far cleaning is.
        """
        observer = observer or SilentObserver()
        report = CleaningReport(split, read=len(rows))
        normal = Normalizer(report.rewritten)
        seen: set[str] = set()
        kept, lengths = [], []
        for number, row in enumerate(rows):
            if number % _DOCUMENTS_BETWEEN_UPDATES == 0:
                observer.update(number, number / len(rows))
            text = _joined(map(normal, row.target.split("\n")))
            lengths.append(len(text))
            reason = self._reason(text, seen) if split == "train" else "" if text else EMPTY
            if reason:
                report.drop(row._replace(target=text), reason)
            else:
                kept.append(row._replace(target=text))
        report.keep(kept)
        if report.dropped[LONG]:
            setting, most = "input.cleaning.max_characters", self.p.max_characters
            report.limits.append(Limit(setting, "characters", most, np.array(lengths)))
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
