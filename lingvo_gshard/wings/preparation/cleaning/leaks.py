"""Leaks: rows of dev and test whose texts also occur in training, found in two passes.

Pass one collects hashes of what dev and test have: folded sources, and word 4-grams of folded
targets. Pass two looks through training for them. Both passes can work on parts of the rows in any
order, since their results are merged as sets. Memory grows with dev and test, but not with
training.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import numpy as np

from lingvo_gshard.core import Params
from lingvo_gshard.data import INPUT_STAGES, LEAKS, CleaningReport, Limit, Row, fold, stages
from lingvo_gshard.wings.preparation.cleaning import all_rules, markup
from lingvo_gshard.wings.preparation.cleaning.cleaner import BaseCleaner, RowRules
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import TextHashes, are_in

EMPTY = "empty"
SHORT = "too short"
LONG = "too long"


class DocumentCleaner(BaseCleaner):
    """Normalizes the lines of documents; drops short, long and repeated documents.

    Repeated blank lines become one, and those at the ends are removed.
    """

    policies = (markup.KEEP, markup.DROP)

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("min_characters", 1, "Smallest number of characters of a document.", minimum=1)
        p.define("max_characters", 0, "Most characters of a document; 0: no limit.", minimum=0)
        p.define("language", "", "Code of the documents' language; '': that of each row.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        lengths = _lengths(self.p.min_characters, self.p.max_characters)
        self._rules = [lengths, *all_rules.of_documents(self.p)]

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


INPUT_STAGES.register(stages.DOCUMENTS)(DocumentCleaner)


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


SOURCE_IN_TRAIN = "held out, but its source is in train"
TARGET_OVERLAPS = "held out, but half of its target's 4-grams are in train"

_GRAM = 4
_ROWS_AT_A_TIME = 4096


def hashes_of(rows: Sequence[Row]) -> np.ndarray:
    """Returns the sorted, distinct hashes of the sources and 4-grams of rows, uint64 [H]."""
    found = [np.zeros(0, np.uint64)]
    for part in _parts(rows):
        found += [np.unique(_source_hashes(part)), np.unique(_Grams(part).hashes)]
    return np.unique(np.concatenate(found))


def reasons_against(rows: Sequence[Row], in_train: np.ndarray) -> list[str]:
    """Returns why each row of dev or test is dropped; "" if it does not leak.

    Args:
      in_train: uint64, sorted: the hashes of these rows that training has, too.
    """
    reasons = []
    for part in _parts(rows):
        grams = _Grams(part)
        overlaps = grams.overlap(are_in(in_train, grams.hashes))
        sources = are_in(in_train, _source_hashes(part))
        reasons += [
            SOURCE_IN_TRAIN if row.source and has_source else TARGET_OVERLAPS if overlap else ""
            for row, has_source, overlap in zip(part, sources, overlaps, strict=True)
        ]
    return reasons


@LEAKS.register("seen_in_train")
def reasons(train: Sequence[Row], held_out: Sequence[Row]) -> list[str]:
    """Returns why each row of dev and test is dropped; "" if it does not leak."""
    wanted, found = hashes_of(held_out), [np.zeros(0, np.uint64)]
    for part in _parts(train):
        hashes = hashes_of(part)
        found.append(hashes[are_in(wanted, hashes)])
    return reasons_against(held_out, np.unique(np.concatenate(found)))


class _Grams:
    """The word 4-grams of the folded targets of rows, each once per row in `hashes`, uint64 [H]."""

    def __init__(self, rows: Sequence[Row]):
        texts = TextHashes([f"{fold(row.target)} " for row in rows])
        # Words end before a space. A folded text has no other spaces, unless it has no word.
        ends = np.flatnonzero(texts.codes == ord(" "))
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
        self._rows = len(rows)
        row = np.searchsorted(texts.starts, ends, "right") - 1
        is_whole = row[_GRAM - 1 :] == row[: max(len(row) - _GRAM + 1, 0)]
        first = np.flatnonzero(is_whole)
        hashes = texts.of(begins[first], ends[first + _GRAM - 1])
        pairs = np.unique(np.stack([row[first].astype(np.uint64), hashes]), axis=1)
        self._row, self.hashes = pairs[0].astype(np.int64), pairs[1]

    def overlap(self, is_common: np.ndarray) -> np.ndarray:
        """Returns bool [rows]: whether half or more of each row's 4-grams are common, bool [H]."""
        total = np.bincount(self._row, minlength=self._rows)
        common = np.bincount(self._row[is_common], minlength=self._rows)
        return (total > 0) & (2 * common >= total)


def _source_hashes(rows: Sequence[Row]) -> np.ndarray:
    # Line ends are in no folded text, so hashes of sources and of 4-grams are of different texts.
    return TextHashes([f"{row.language}\n{fold(row.source)}\n" for row in rows]).whole()


def _parts(rows: Sequence[Row]) -> Iterable[Sequence[Row]]:
    for begin in range(0, len(rows), _ROWS_AT_A_TIME):
        yield rows[begin : begin + _ROWS_AT_A_TIME]
