"""Cleaning of sentence pairs: normalizes rows, drops useless training rows, and counts both."""

import collections
import itertools
import unicodedata
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.data.observer import Observer, SilentObserver
from lingvo_gshard.data.sources.report import CleaningReport, Limit
from lingvo_gshard.data.sources.row import Row

# Persian, Hindi and other languages spell words with these two joiners.
_KEPT_FORMATS = "\u200c\u200d"
_ROWS_BETWEEN_UPDATES = 4096
# Beyond this length, marks are ordered before unicodedata normalizes a text.
_MANY_CHARACTERS = 4096

EMPTY = "a side is empty"
IDENTICAL = "both sides are identical"
SHORT = "a side is too short"
LONG = "a side is too long"
RATIO = "the sides' lengths are too unlike"
DUPLICATE = "a duplicate"
REWRITTEN_NFC = "rewritten in Unicode NFC"
REWRITTEN_CONTROL = "control characters taken out"
REWRITTEN_SPACE = "white space made single"


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

    def clean(
        self, rows: Sequence[Row], split: str, observer: Observer | None = None
    ) -> tuple[list[Row], CleaningReport]:
        """Returns the rows kept and the report.

        Rows of dev and test are normalized, but dropped only if a side is empty, so that scores are
        of the test set as it was given.

        Args:
          rows: the rows.
          split: the split they belong to.
          observer: is told how far cleaning is.
        """
        observer = observer or SilentObserver()
        report = CleaningReport(split, read=len(rows))
        normal = Normalizer(report.rewritten)
        reason_of = _Reasons(self.p) if split == "train" else _empty
        kept, lengths = [], []
        for number, row in enumerate(rows):
            if number % _ROWS_BETWEEN_UPDATES == 0:
                observer.update(number, number / len(rows))
            language, source, target, file, line = row
            clean = row
            normal_source, normal_target = normal(source), normal(target)
            if normal_source is not source or normal_target is not target:
                clean = Row(language, normal_source, normal_target, file, line)
            lengths.append(max(len(clean.source), len(clean.target)))
            reason = reason_of(clean)
            if reason:
                report.drop(clean, reason)
            else:
                kept.append(clean)
        report.keep(kept)
        if report.dropped[LONG]:
            setting, unit = "input.cleaning.max_characters", "characters on a side"
            report.limits.append(Limit(setting, unit, self.p.max_characters, np.array(lengths)))
        return kept, report


class _Reasons:
    """Decides why a training row is dropped."""

    def __init__(self, params: Params):
        # Attributes of Params are looked up in a tree, which is slow for every row.
        self._least, self._most = params.min_characters, params.max_characters
        self._ratio = params.max_length_ratio
        self._identical, self._duplicates = params.drop_identical, params.drop_duplicates
        self._seen: set[tuple[str, str, str]] = set()

    def __call__(self, row: Row) -> str:
        """Returns why the row is dropped; "" if it is kept."""
        language, source, target, _, _ = row
        short, long = len(source), len(target)
        if short > long:
            short, long = long, short
        if not short:
            return EMPTY
        if short < self._least:
            return SHORT
        if long > self._most:
            return LONG
        if long > self._ratio * short:
            return RATIO
        if self._identical and source.casefold() == target.casefold():
            return IDENTICAL
        if self._duplicates:
            key = (language, source, target)
            if key in self._seen:
                return DUPLICATE
            self._seen.add(key)
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
            text = _composed(text)
            self._counts[REWRITTEN_NFC] += 1
        # U+0020 is the only white space that isprintable accepts.
        if text.isprintable() and "  " not in text and text == text.strip():
            return text
        visible = text.translate(_VISIBLE)
        # Taking a character out may bring a letter and its accent together.
        single = _composed(" ".join(visible.split()))
        if visible != text:
            self._counts[REWRITTEN_CONTROL] += 1
        if single != visible:
            self._counts[REWRITTEN_SPACE] += 1
        return single


def _composed(text: str) -> str:
    """Returns a text in Unicode NFC.

    unicodedata sorts the marks of a letter by insertion, whose time grows with the square of their
    number. In a long text they are therefore sorted beforehand, which does not change the result.
    """
    if len(text) > _MANY_CHARACTERS:
        apart = "".join(unicodedata.normalize("NFD", character) for character in text)
        text = "".join(
            "".join(sorted(run, key=unicodedata.combining) if is_mark else run)
            for is_mark, run in itertools.groupby(apart, lambda c: unicodedata.combining(c) > 0)
        )
    return unicodedata.normalize("NFC", text)


class _VisibleCharacters(dict[int, str]):
    """Maps code points for `str.translate`; each is looked up in Unicode's tables once."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if category == "Cc":
            character = " "
        elif category == "Cf" and character not in _KEPT_FORMATS:
            character = ""
        self[code] = character
        return character


_VISIBLE = _VisibleCharacters()


def _empty(row: Row) -> str:
    return "" if row.source and row.target else EMPTY
