"""Normalizer: converts lines to the normal form that vocabularies and models see."""

from __future__ import annotations

import collections
import functools
import itertools
import re
import unicodedata
from typing import Literal

import regex

REWRITTEN_CONTROL = "control characters taken out"
REWRITTEN_SPACE = "white space made single"
REWRITTEN_JOINERS = "stray zero-width joiners taken out"

NFC, NFKC = FORMS = ("NFC", "NFKC")
REWRITTEN_NFC, REWRITTEN_NFKC = REWRITTEN_FORM = tuple(
    f"rewritten in Unicode {form}" for form in FORMS
)

# Persian, Hindi and other languages spell words with these two joiners.
_JOINERS = "\u200c\u200d"
# Beyond this length, marks are ordered before unicodedata normalizes a text.
_MANY_CHARACTERS = 4096
# Scripts whose letters change their shape beside a joiner, after chapters 9 and 12 to 16 of the
# Unicode Standard (https://www.unicode.org/versions/latest/core-spec/).
_JOINED = (
    "Arab Syrc Mand Mong Nkoo Adlm Rohg Phag Deva Beng Guru Gujr Orya Taml Telu Knda Mlym Sinh "
    "Tibt Mymr Khmr Laoo Thai Limb Newa Java Bali Sund Cakm Mtei"
).split()
# Joiners also tie emoji to one picture (https://unicode.org/reports/tr51/, section 2.3).
_TIED = r"\p{Extended_Pictographic}\p{Emoji_Modifier}\ufe0f"


class Normalizer:
    """Converts lines to the normal form that vocabularies and models see, and counts changes.

    The normal form is Unicode NFC (https://unicode.org/reports/tr15/) without control characters,
    without format characters other than joiners, and without leading, trailing or repeated white
    space.
    """

    def __init__(
        self,
        counts: collections.Counter[str] | None = None,
        form: str = NFC,
        drop_stray_joiners: bool = False,
    ):
        """Prepares the normal form.

        Args:
          counts: counts the changes; None counts nothing.
          form: "NFC", or "NFKC", which also replaces full-width letters, ligatures and the like.
          drop_stray_joiners: whether to take out joiners after characters that none can join.
        """
        self._counts = collections.Counter() if counts is None else counts
        self._form: Literal["NFC", "NFKC"] = "NFKC" if form == NFKC else "NFC"
        self._rewritten = REWRITTEN_FORM[FORMS.index(form)]
        self._drops_joiners = drop_stray_joiners

    def __call__(self, text: str) -> str:
        """Returns the normal form of one line."""
        # ASCII is in every normal form.
        if not text.isascii() and not unicodedata.is_normalized(self._form, text):
            text = _composed(text, self._form)
            self._counts[self._rewritten] += 1
        # U+0020 is the only white space that isprintable accepts.
        if text.isprintable() and "  " not in text and text == text.strip():
            return text
        return self._without_invisible(text)

    def _without_invisible(self, text: str) -> str:
        visible = text.translate(_VISIBLE)
        if visible != text:
            self._counts[REWRITTEN_CONTROL] += 1
        if self._drops_joiners and _has_joiner(visible):
            joined = without_stray_joiners(visible)
            self._counts[REWRITTEN_JOINERS] += joined != visible
            visible = joined
        # Taking a character out may bring a letter and its accent together.
        single = _composed(" ".join(visible.split()), self._form)
        if single != visible:
            self._counts[REWRITTEN_SPACE] += 1
        return single


def without_stray_joiners(text: str) -> str:
    """Returns a text without zero-width joiners after characters that none can join.

    Joiners stay after letters and marks of scripts that use them. U+200D also stays in emoji.
    """
    for joiner, pattern in _stray_patterns().items():
        if joiner in text:
            text = pattern.sub("", text)
    return text


_has_joiner = re.compile(f"[{_JOINERS}]").search


@functools.cache
def _stray_patterns() -> dict[str, regex.Pattern[str]]:
    """Returns a joiner -> a pattern that finds it where it joins nothing."""
    joined = "".join(rf"\p{{scx={script}}}" for script in _JOINED)
    non_joiner, joiner = _JOINERS
    return {
        non_joiner: regex.compile(f"(?<![{joined}]){non_joiner}+"),
        joiner: regex.compile(f"(?<![{joined}{_TIED}]){joiner}+"),
    }


def _composed(text: str, form: Literal["NFC", "NFKC"] = "NFC") -> str:
    """Returns a text in a Unicode normal form.

    unicodedata sorts the marks of a letter by insertion, whose time grows with the square of their
    number. In a long text they are therefore sorted beforehand, which does not change the result.
    """
    if len(text) > _MANY_CHARACTERS:
        apart = "".join(
            unicodedata.normalize("NFD" if form == "NFC" else "NFKD", character)
            for character in text
        )
        text = "".join(
            "".join(sorted(run, key=unicodedata.combining) if is_mark else run)
            for is_mark, run in itertools.groupby(apart, lambda c: unicodedata.combining(c) > 0)
        )
    return unicodedata.normalize(form, text)


class _VisibleCharacters(dict[int, str]):
    """Maps code points for `str.translate`; each is looked up in Unicode's tables once."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if category == "Cc":
            character = " "
        elif category == "Cf" and character not in _JOINERS:
            character = ""
        self[code] = character
        return character


_VISIBLE = _VisibleCharacters()
