"""Cleaner: cleans sentence pairs."""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.core import SILENT, Configurable, Params, Progress, UserError
from lingvo_gshard.data import INPUT_STAGES, CleaningReport, Limit, Row, stages
from lingvo_gshard.wings.preparation.cleaning import (
    all_rules,
    markup,
    near_duplicates,
    normalization,
)
from lingvo_gshard.wings.preparation.cleaning.all_rules import Rule
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import NearDuplicates
from lingvo_gshard.wings.preparation.cleaning.normalization import Normalizer
from lingvo_gshard.wings.preparation.cleaning.report_notes import merge


class RowRules:
    """Normalizes rows one by one and drops some. What becomes of a row depends on it alone."""

    def __init__(
        self,
        report: CleaningReport,
        normal: Callable[[Row], Row],
        rules: Sequence[Rule],
        limit: Limit | None,
    ):
        """Prepares cleaning.

        Args:
          report: counts the rows read and dropped, with an example of each reason.
          normal: returns a row in normal form.
          rules: say why a row is dropped, the most telling first.
          limit: the limit on characters, which `finish` adds to the report with all lengths.
        """
        self._report, self._normal, self._rules, self._limit = report, normal, rules, limit
        self._lengths: collections.Counter[int] = collections.Counter()

    def __call__(self, row: Row) -> Row | None:
        """Returns the row in normal form; None if it is dropped."""
        self._report.read += 1
        clean = self._normal(row)
        _, source, target, _, _ = clean
        self._lengths[max(len(source), len(target))] += 1
        for rule in self._rules:
            reason = rule(clean)
            if reason:
                self._report.drop(clean, reason)
                return None
        return clean

    def finish(self) -> None:
        """Adds the lengths of all rows to the report, for its advice about the limit."""
        if self._limit:
            part = CleaningReport(limits=[dataclasses.replace(self._limit, lengths=self._lengths)])
            merge(self._report, part)
            self._lengths = collections.Counter()


_ROWS_BETWEEN_UPDATES = 4096


class BaseCleaner(Configurable, abc.ABC):
    """Normalizes rows and drops rows that would only add noise to training.

    `rules` cleans row by row, for pipelines that work on parts of a corpus. `clean` also drops
    duplicates, among rows in memory.

    Attributes:
      near_duplicates: finds near duplicates, if that is switched on.
      policies: what may become of rows with markup or placeholders.
    """

    policies = markup.POLICIES

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "unicode_form",
            normalization.NFC,
            "Unicode's normal form: 'NFC', or 'NFKC', which also replaces full-width letters, "
            "ligatures and the like.",
            choices=normalization.FORMS,
        )
        p.define(
            "drop_stray_joiners", False, "Whether to drop zero-width joiners that join nothing."
        )
        p.define("drop_duplicates", True, "Whether to drop repeated rows.")
        p.define("near_duplicates", NearDuplicates.params(), "Params of near duplicates.")
        all_rules.define(p, cls.policies)
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        least, most = self.p.min_characters, self.p.max_characters
        if least > (most or least):
            raise UserError(
                "input.cleaning.min_characters must be at most max_characters, not "
                f"{least} with max_characters {most}"
            )
        self.near_duplicates: NearDuplicates = self.p.near_duplicates.instantiate()

    @property
    def unicode_form(self) -> str:
        """Unicode's normal form of the rows that are kept."""
        return self.p.unicode_form

    @abc.abstractmethod
    def rules(self, split: str, report: CleaningReport) -> RowRules:
        """Returns what cleans the rows of a split one by one, and counts in the report.

        Rows of dev and test are normalized, but dropped only if a side is empty, so that scores are
        of the test set as it was given.
        """

    def clean(
        self, rows: Sequence[Row], split: str, progress: Progress = SILENT
    ) -> tuple[list[Row], CleaningReport]:
        """Returns the rows kept and the report."""
        report = CleaningReport(split)
        clean_row = self.rules(split, report)
        drops_duplicates = split == "train" and self.p.drop_duplicates
        seen: set[tuple[str, ...]] = set()
        kept = []
        for number, row in enumerate(rows):
            if number % _ROWS_BETWEEN_UPDATES == 0:
                progress.update(number, number / len(rows))
            clean = clean_row(row)
            if clean is None:
                continue
            if drops_duplicates and clean[:3] in seen:
                report.drop(clean, near_duplicates.DUPLICATE)
            else:
                if drops_duplicates:
                    seen.add(clean[:3])
                kept.append(clean)
        clean_row.finish()
        if split == "train" and self.near_duplicates.is_on:
            kept = self._without_near_duplicates(kept, report)
        report.keep(kept)
        return kept, report

    def _without_near_duplicates(self, rows: list[Row], report: CleaningReport) -> list[Row]:
        copies = set(self.near_duplicates.copies_among(rows))
        for index in sorted(copies):
            report.drop(rows[index], near_duplicates.NEAR_DUPLICATE)
        return [row for index, row in enumerate(rows) if index not in copies]

    def _normalizer_to(self, report: CleaningReport) -> Normalizer:
        return Normalizer(report.rewritten, self.p.unicode_form, self.p.drop_stray_joiners)


class Cleaner(BaseCleaner):
    """Normalizes sentence pairs and drops pairs that would only add noise to training."""

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
        p.define("drop_identical", True, "Whether to drop rows with equal sides, ignoring case.")
        p.define("target_language", "", "Code of the targets' language; '': not known.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self._rules = all_rules.of_pairs(self.p)

    def rules(self, split: str, report: CleaningReport) -> RowRules:
        """Returns what cleans the pairs of a split one by one, and counts in the report."""
        normal = self._normalizer_to(report)

        def normal_row(row: Row) -> Row:
            language, source, target, file, line = row
            normal_source, normal_target = normal(source), normal(target)
            if normal_source is source and normal_target is target:
                return row
            return Row(language, normal_source, normal_target, file, line)

        setting, unit = "input.cleaning.max_characters", "characters on a side"
        limit = Limit(setting, unit, self.p.max_characters, collections.Counter())
        if split != "train":
            return RowRules(report, normal_row, [all_rules.empty_side], None)
        return RowRules(report, normal_row, self._rules, limit)


INPUT_STAGES.register(stages.PAIRS)(Cleaner)
