"""Rows of the fields of objects: of JSON lines, Parquet, and data sets of Hugging Face."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lingvo_gshard.data import Row
from lingvo_gshard.wings.preparation import token_ids
from lingvo_gshard.wings.preparation.prepared.manifest import NO_LANGUAGE

NO_FIELD = "a field is missing or no text"
# Field with a text in each of several languages, as Hugging Face's data sets have it.
TRANSLATION = "translation"
_NULS = "it has NUL bytes; no text has any"


@dataclasses.dataclass(frozen=True)
class Fields:
    """Names of the fields of an object that is a sentence pair or, if `is_text`, a text.

    If `has_ids`, fields are lists of token ids.
    Objects that name no language have `language`; of objects `translation`, only this one is read.
    Dots in names reach into objects, as in "meta.lang".
    """

    is_text: bool = False
    has_ids: bool = False
    language: str = NO_LANGUAGE
    target_language: str = "en"
    language_field: str = "language"
    source_field: str = "source"
    target_field: str = "target"
    text_field: str = "text"

    @property
    def texts(self) -> tuple[str, ...]:
        """The fields that have the texts of a row."""
        return (self.text_field,) if self.is_text else (self.source_field, self.target_field)

    @property
    def columns(self) -> frozenset[str]:
        """The columns of a table to read. Of a field within another, the whole column is read."""
        names = (self.language_field, self.source_field, self.target_field, self.text_field)
        return frozenset((*names, *(name.partition(".")[0] for name in names), TRANSLATION))

    @property
    def needed_columns(self) -> frozenset[str]:
        """The columns that have texts. A table must have at least one of them."""
        return frozenset((*self.texts, *(n.partition(".")[0] for n in self.texts), TRANSLATION))

    def rows(self, fields: Mapping, path: str, number: int) -> list[Row] | str:
        """Returns the rows of an object at a line of a file, or what is wrong with it."""
        language = _field(fields, self.language_field)
        language = self.language if language is None else language
        texts = [_field(fields, name) for name in self.texts]
        if self.has_ids:
            texts = [token_ids.to_text(ids) for ids in texts]
        elif texts == [None, None] and isinstance(fields.get(TRANSLATION), Mapping):
            return self._translations(fields[TRANSLATION], path, number)
        found = [text for text in texts if isinstance(text, str)]
        if not isinstance(language, str) or len(found) < len(texts):
            return _missing(fields, self.texts, "token ids" if self.has_ids else "text")
        if any("\0" in text for text in found):
            return _NULS
        return [Row(language, "" if self.is_text else found[0], found[-1], path, number)]

    def _translations(self, texts: Mapping, path: str, number: int) -> list[Row] | str:
        """Returns a row for each language but the target's, or what is wrong."""
        if isinstance(texts.get("language"), list) and isinstance(texts.get("translation"), list):
            # TFDS and Hugging Face's TranslationVariableLanguages. The first of variants is read.
            texts = dict(zip(texts["language"][::-1], texts["translation"][::-1], strict=False))
        target = texts.get(self.target_language)
        wanted = "" if self.language == NO_LANGUAGE else self.language
        others = {code: text for code, text in texts.items() if code != self.target_language}
        if wanted:
            others = {code: text for code, text in others.items() if code == wanted}
        if not isinstance(target, str) or not any(isinstance(t, str) for t in others.values()):
            return _missing(texts, [wanted or "another language", self.target_language])
        found = {code: text for code, text in others.items() if isinstance(text, str)}
        if any("\0" in text for text in (target, *found.values())):
            return _NULS
        return [Row(code, text, target, path, number) for code, text in found.items()]


def _field(fields: Mapping, name: str) -> object:
    """Returns a field; dots in its name reach into objects."""
    if name in fields:
        return fields[name]
    first, dot, rest = name.partition(".")
    inner = fields.get(first)
    return _field(inner, rest) if dot and isinstance(inner, Mapping) else None


def _missing(fields: Mapping, names: Sequence[str], what: str = "text") -> str:
    """Returns which fields are there in place of those expected."""
    found = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items())
    expected = " and ".join(map(repr, names))
    return f"expected {what} in {expected}; found {found[:200] or 'none'}"
