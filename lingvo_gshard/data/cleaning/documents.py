"""DocumentCleaner: cleans documents, which are texts without a source."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.cleaning.base import BaseCleaner
from lingvo_gshard.data.cleaning.row_rules import RowRules
from lingvo_gshard.data.cleaning.rules import all_rules
from lingvo_gshard.data.sources.report import CleaningReport, Limit
from lingvo_gshard.data.sources.row import Row

EMPTY = "empty"
SHORT = "too short"
LONG = "too long"


class DocumentCleaner(BaseCleaner):
    """Normalizes the lines of documents; drops short, long and repeated documents.

    Repeated blank lines become one, and those at the ends are removed.
    """

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
        p.define("language", "", "Code of the documents' language; '': that of each row.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        least, most = self.p.min_characters, self.p.max_characters
        if least > (most or least):
            raise UserError(
                "input.cleaning.min_characters must be at most max_characters, not "
                f"{least} with max_characters {most}"
            )
        self._rules = [_lengths(least, most), *all_rules.of_documents(self.p)]

    def rules(self, split: str, report: CleaningReport) -> RowRules:
        """Returns what cleans the documents of a split one by one, and counts in the report."""
        normal = self._normalizer_to(report)

        def normal_row(row: Row) -> Row:
            return row._replace(target=_joined(map(normal, row.target.split("\n"))))

        if split != "train":
            return RowRules(report, normal_row, [_lengths(1, 0)], None)
        most = self.p.max_characters
        limit = Limit("input.cleaning.max_characters", "characters", most, collections.Counter())
        return RowRules(report, normal_row, self._rules, limit if most else None)


def _lengths(least: int, most: int) -> all_rules.Rule:
    def reason(row: Row) -> str:
        length = len(row.target)
        if not length:
            return EMPTY
        if length < least:
            return SHORT
        return LONG if most and length > most else ""

    return reason


def _joined(lines: Iterable[str]) -> str:
    """Joins lines to one text with no two blank lines in a row and none at the ends."""
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    return "\n".join(kept).rstrip("\n")
