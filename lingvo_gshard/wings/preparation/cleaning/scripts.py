"""WrongScript: finds texts whose letters do not belong to their language.

language_scripts.json has the scripts of languages, by the codes of ISO 15924. Its sources are under
the Unicode License v3:
https://github.com/unicode-org/cldr-json/tree/47.0.0/cldr-json/cldr-core/supplemental
languageData.json has the scripts that each language is written in, likelySubtags.json the likely
one, and aliases.json codes of three letters. Latin letters as a second way of writing a language
are left out: the rows they would allow are mostly English. In place of Hans, Hant, Jpan and Kore
stand the scripts of their characters: Hani, Hira, Kana and Hang.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence

import regex

from lingvo_gshard.core import UserError, names, objects

_LATIN = "Latn"
# Subtags that name the script of a variant: of zh-Hant, and in names of locales such as sr@latin.
_CHARACTERS_OF = objects.table_beside(__file__, "variant_scripts.json", dict[str, tuple[str, ...]])
_SEPARATOR = re.compile(r"[-_@.]")
_LAST_USUAL = 0xFFFF
_LETTER = re.compile(r"[^\W\d_]")


class WrongScript:
    """Decides whether most letters of a text are outside of the scripts of its language.

    Letters that several scripts share, digits and punctuation do not count. A language whose
    scripts are not known accepts all.
    """

    def __init__(self, most: float, given: Sequence[str] = ()):
        """Prepares the rule.

        Args:
          most: largest share of letters outside of the language's scripts.
          given: "language=Script+Script" for languages whose scripts differ from the table's.

        Raises:
          UserError: one of `given` is malformed, or names an unknown script.
        """
        self._most = most
        self._given = _parsed(given)
        self._rules: dict[str, tuple[bool, _ForeignLetters | None]] = {}

    def __call__(self, language: str, text: str) -> bool:
        """Returns whether a text of a language is in a wrong script."""
        rule = self._rules.get(language)
        if rule is None:
            rule = self._rules[language] = self._rule(language)
        is_latin, foreign = rule
        if foreign is None or (is_latin and text.isascii()):
            return False
        outside = foreign.count(text)
        return outside > 0 and outside > self._most * len(_LETTER.findall(text))

    def _rule(self, language: str) -> tuple[bool, _ForeignLetters | None]:
        scripts = self._given.get(language) or scripts_of(language)
        return _LATIN in scripts, _foreign_letters(scripts) if scripts else None


@functools.lru_cache(maxsize=4096)
def scripts_of(language: str) -> tuple[str, ...]:
    """Returns the scripts of a language, by their codes in ISO 15924; () if they are not known.

    Args:
      language: a code such as de, pt_BR, zh-Hant, sr@latin or deu_Latn. A script that it names is
        the only one.
    """
    code, *subtags = _SEPARATOR.split(language)
    for subtag in subtags:
        if subtag.lower() in _CHARACTERS_OF:
            return _CHARACTERS_OF[subtag.lower()]
        if subtag.title() in _known_scripts():
            return (subtag.title(),)
    return _table().get(code.lower(), ())


@functools.cache
def languages() -> dict[str, str]:
    """Returns scripts, separated by spaces -> codes of languages that are written in them."""
    return objects.table_beside(__file__, "language_scripts.json", dict[str, str])


@functools.cache
def _table() -> Mapping[str, tuple[str, ...]]:
    return {
        code: tuple(scripts.split())
        for scripts, codes in languages().items()
        for code in codes.split()
    }


@functools.cache
def _known_scripts() -> frozenset[str]:
    return frozenset(script for scripts in languages() for script in scripts.split())


@functools.cache
def _all_letters() -> str:
    return "".join(_LETTER.findall("".join(map(chr, range(sys.maxunicode + 1)))))


class _ForeignLetters:
    """Counts the letters of a text that are outside of some scripts.

    The patterns list ranges of letters: re searches ranges several times faster than regex searches
    a property. re has a fast table only for characters up to U+FFFF, so higher characters have a
    separate pattern.
    """

    def __init__(self, scripts: tuple[str, ...]):
        own = "".join(rf"\p{{sc={script}}}" for script in (*scripts, "Zyyy", "Zinh"))
        codes = [ord(letter) for letter in regex.findall(rf"[^{own}]", _all_letters())]
        self._usual = _runs_of([code for code in codes if code <= _LAST_USUAL])
        self._rare = _runs_of([code for code in codes if code > _LAST_USUAL])

    def count(self, text: str) -> int:
        """Returns the number of letters outside of the scripts."""
        found = self._usual.findall(text)
        if max(text, default="") > chr(_LAST_USUAL):
            found += self._rare.findall(text)
        return sum(map(len, found)) if found else 0


_foreign_letters = functools.lru_cache(maxsize=256)(_ForeignLetters)


def _runs_of(codes: Sequence[int]) -> re.Pattern[str]:
    """Returns a pattern of runs of characters; `codes` are sorted."""
    body = "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in ranges_of(codes))
    return re.compile(f"[{body}]+")


def ranges_of(codes: Sequence[int]) -> list[list[int]]:
    """Returns the first and the last code of each range of neighbors among sorted ones."""
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return ranges


def _parsed(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    parsed = {}
    for entry in names.listed(given):
        language, equals, scripts = entry.partition("=")
        chosen = tuple(scripts.split("+"))
        if not language or not equals or not all(chosen):
            raise UserError(
                f"input.cleaning.scripts has {entry!r}; 'language=Script' or "
                "'language=Script+Script' was expected, such as 'mni=Mtei'"
            )
        for script in chosen:
            where = f"input.cleaning.scripts has {entry!r}"
            names.check(script, _known_scripts(), f"{where}: {script!r} is no script of ISO 15924")
        parsed[language] = chosen
    return parsed
