"""Source: raw files of one format that make up one corpus."""

from __future__ import annotations

import dataclasses
import os
import re

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.prepared import manifest
from lingvo_gshard.data.sources import compression
from lingvo_gshard.data.sources.readers import SPLITS
from lingvo_gshard.data.sources.text import DOCUMENTS, PARAGRAPH

TSV, MOSES, GETTEXT, JSON_LINES, PARQUET, TEXT = FORMATS = (
    "tsv",
    "moses",
    "gettext",
    "jsonl",
    "parquet",
    "text",
)
CONTENTS = (manifest.PAIRS, manifest.TEXT)
_FORMAT_OF_ENDING = {
    ".tsv": TSV,
    ".po": GETTEXT,
    ".mo": GETTEXT,
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".parquet": PARQUET,
    ".txt": TEXT,
}
# Names of sources and languages become parts of file names.
NAME = re.compile(r"[\w@+-][\w.@+-]*", re.ASCII)
_UNFIT = re.compile(r"[^\w.@+-]+", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Source:
    """Raw files of one format.

    Attributes:
      path: a file or a glob; a directory of gettext catalogs; the prefix of Moses pairs.
      format: "tsv", "moses", "gettext", "jsonl", "parquet" or "text"; "": by the path's end.
      name: what shards and weights call the source; "": from the path.
      content: "pairs" or "text", which has no sources; "": "text" for that format, else "pairs".
      split: "train", "dev" or "test"; "": rows are divided by a hash of their target.
      language: language of rows that name none.
      target_language: language of the targets, for Moses pairs and gettext catalogs.
      document: unit of a document of text: "file", "line" or "paragraph".
      language_field: field or column of the language, for JSON lines and Parquet.
      source_field: that of the source.
      target_field: that of the target.
      text_field: that of a text without a source.
    """

    path: str
    format: str = ""
    name: str = ""
    content: str = ""
    split: str = ""
    language: str = manifest.NO_LANGUAGE
    target_language: str = "en"
    document: str = PARAGRAPH
    language_field: str = "language"
    source_field: str = "source"
    target_field: str = "target"
    text_field: str = "text"

    def __post_init__(self):
        """Completes format and name; ValueError if a value is wrong."""
        if not self.path:
            raise UserError(f"{self._flag()}: names no file")
        object.__setattr__(self, "format", self.format or self._format())
        usual = manifest.TEXT if self.format == TEXT else manifest.PAIRS
        object.__setattr__(self, "content", self.content or usual)
        fields = {
            "format": (self.format, FORMATS),
            "content": (self.content, CONTENTS),
            "split": (self.split, ("", *SPLITS)),
            "document": (self.document, DOCUMENTS),
        }
        for field, (value, choices) in fields.items():
            if value not in choices:
                hint = names.nearest(value, [choice for choice in choices if choice])
                raise UserError(f"{self._flag()}: {field}={value} is unknown. {hint}")
        if self.format == TEXT and self.content != manifest.TEXT:
            raise UserError(f"{self._flag()}: files of text have content=text, not pairs")
        object.__setattr__(self, "name", self.name or _name_from(self.path))
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"{self._flag()}: name={self.name} becomes part of file names: letters, digits and "
                "_ . @ + - were expected, and no dot at the beginning"
            )

    @classmethod
    def parse(cls, text: str) -> Source:
        """Returns the source that a flag describes, such as "data/train,format=moses".

        Args:
          text: the path, then field=value for fields that differ from the defaults.

        Raises:
          UserError: a field is unknown or has a wrong value.
        """
        path, *settings = text.split(",")
        fields = [field.name for field in dataclasses.fields(cls)][1:]
        given = {}
        for setting in settings:
            field, equals, value = setting.partition("=")
            if not equals:
                raise UserError(
                    f"`source={text}`: {setting!r} is not of the form field=value. Fields are "
                    f"{', '.join(fields)}"
                )
            if field not in fields:
                raise UserError(
                    f"`source={text}`: unknown field {field!r}. {names.nearest(field, fields)}"
                )
            given[field] = value
        return cls(os.path.expanduser(path), **given)

    def _format(self) -> str:
        _, ending = os.path.splitext(compression.without_suffix(self.path))
        if ending in _FORMAT_OF_ENDING:
            return _FORMAT_OF_ENDING[ending]
        if os.path.isdir(self.path):
            return GETTEXT
        raise UserError(
            f"{self._flag()}: the path does not say its format; add one of "
            f"{', '.join(f'format={name}' for name in FORMATS)}"
        )

    def _flag(self) -> str:
        return f"`source={self.path}`"


def _name_from(path: str) -> str:
    """Returns a name for a source whose user gave none."""
    stem = compression.without_suffix(os.path.basename(path.rstrip("/")))
    for ending in _FORMAT_OF_ENDING:
        stem = stem.removesuffix(ending)
    if set("*?[") & set(stem):
        stem = os.path.basename(os.path.dirname(path)) if stem.strip("*?[].") == "" else stem
    return _UNFIT.sub("-", stem).strip("-.") or "corpus"
