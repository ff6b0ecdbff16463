"""Cleaner: cleans sentence pairs."""

from __future__ import annotations

import collections

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.cleaning.base import BaseCleaner
from lingvo_gshard.data.cleaning.row_rules import RowRules
from lingvo_gshard.data.cleaning.rules import all_rules
from lingvo_gshard.data.sources.report import CleaningReport, Limit
from lingvo_gshard.data.sources.row import Row


class Cleaner(BaseCleaner):
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
        p.define("drop_identical", True, "Whether to drop rows with equal sides, ignoring case.")
        p.define("target_language", "", "Code of the targets' language; '': not known.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if self.p.min_characters > self.p.max_characters:
            raise UserError(
                "input.cleaning.min_characters must be at most max_characters, not "
                f"{self.p.min_characters} with max_characters {self.p.max_characters}"
            )
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
