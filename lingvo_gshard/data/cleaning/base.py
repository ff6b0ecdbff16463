"""BaseCleaner: what the cleaning of sentence pairs and of documents have in common."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.data.cleaning import duplicates, near_duplicates, normalization
from lingvo_gshard.data.cleaning.near_duplicates import NearDuplicates
from lingvo_gshard.data.cleaning.normalization import Normalizer
from lingvo_gshard.data.cleaning.row_rules import RowRules
from lingvo_gshard.data.cleaning.rules import all_rules
from lingvo_gshard.data.observer import Observer, SilentObserver
from lingvo_gshard.data.sources.report import CleaningReport
from lingvo_gshard.data.sources.row import Row

_ROWS_BETWEEN_UPDATES = 4096


class BaseCleaner(Configurable, abc.ABC):
    """Normalizes rows and drops those that would only add noise to training.

    `rules` cleans row by row, for pipelines that work on parts of a corpus. `clean` also drops
    duplicates, among rows in memory.

    Attributes:
      near_duplicates: finds near duplicates, if that is switched on.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "unicode_form",
            normalization.NFC,
            "Unicode's normal form: 'NFC', or 'NFKC', which also replaces full-width letters, "
            "ligatures and the like.",
        )
        p.define(
            "drop_stray_joiners",
            False,
            "Whether to take out zero-width joiners after characters that none can join.",
        )
        p.define("drop_duplicates", True, "Whether to drop repeated rows.")
        p.define("near_duplicates", NearDuplicates.params(), "Params of near duplicates.")
        all_rules.define(p)
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        # Refuses wrong settings before anything is read.
        self._normalizer_to(CleaningReport())
        self.near_duplicates: NearDuplicates = self.p.near_duplicates.instantiate()

    @abc.abstractmethod
    def rules(self, split: str, report: CleaningReport) -> RowRules:
        """Returns what cleans the rows of a split one by one, and counts in the report.

        Rows of dev and test are normalized, but dropped only if a side is empty, so that scores are
        of the test set as it was given.
        """

    def clean(
        self, rows: Sequence[Row], split: str, observer: Observer | None = None
    ) -> tuple[list[Row], CleaningReport]:
        """Returns the rows kept and the report.

        Args:
          rows: the rows.
          split: the split they belong to.
          observer: is told how far cleaning is.
        """
        observer = observer or SilentObserver()
        report = CleaningReport(split)
        clean_row = self.rules(split, report)
        seen = duplicates.Seen() if split == "train" and self.p.drop_duplicates else None
        kept = []
        for number, row in enumerate(rows):
            if number % _ROWS_BETWEEN_UPDATES == 0:
                observer.update(number, number / len(rows))
            clean = clean_row(row)
            if clean is None:
                continue
            if seen and seen.has(clean):
                report.drop(clean, duplicates.REASON)
            else:
                kept.append(clean)
        clean_row.finish()
        if split == "train" and self.near_duplicates.is_on:
            kept = self._without_near_duplicates(kept, report)
        report.keep(kept)
        return kept, report

    def _without_near_duplicates(self, rows: list[Row], report: CleaningReport) -> list[Row]:
        copies = set(self.near_duplicates.copies_among(rows))
        for index in sorted(copies):
            report.drop(rows[index], near_duplicates.REASON)
        return [row for index, row in enumerate(rows) if index not in copies]

    def _normalizer_to(self, report: CleaningReport) -> Normalizer:
        return Normalizer(report.rewritten, self.p.unicode_form, self.p.drop_stray_joiners)
