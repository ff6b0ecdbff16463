"""RowRules: cleans single rows, whatever rows came before, and counts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.data.cleaning.rules.all_rules import Rule
from lingvo_gshard.data.sources.report import CleaningReport, Limit
from lingvo_gshard.data.sources.row import Row


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
            self._report.merge(part)
            self._lengths = collections.Counter()
