"""Source: raw files of one format that make up one corpus."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator

import msgspec
import numpy as np

from lingvo_gshard.core import UserError, is_bucket, names, objects
from lingvo_gshard.data import compression, readers, text
from lingvo_gshard.wings.preparation.formats import archives, datasets
from lingvo_gshard.wings.preparation.formats.quoted import DELIMITERS
from lingvo_gshard.wings.preparation.prepared import manifest

TSV, CSV, TEXT, JSON_LINES = "tsv", "csv", "text", "jsonl"
MOSES, GETTEXT, TMX, XLIFF, QT = "moses", "gettext", "tmx", "xliff", "qt"
ARB, PROPERTIES, SGM, WMT = "arb", "properties", "sgm", "wmt"
PARQUET, ARROW, MEGATRON = "parquet", "arrow", "megatron"
TFRECORD, ARRAY_RECORD = "tfrecord", "array_record"
CONTENTS = (manifest.PAIRS, manifest.TEXT)


class _Formats(msgspec.Struct, frozen=True):
    """The formats of raw files.

    Attributes:
      keyed: those with a file for each language, whose targets are in another file of the same
        name.
      objects: those whose rows are objects with fields.
      whole: those whose files are read from local disks only, and not from archives.
      endings: ending of a path -> its format.
      fields: field of a source that only some formats have -> these formats.
      kinds: content of a source -> what its rows are in words, without and with token ids.
      names: format, "" for all others -> field of a source that names a field -> default.
    """

    formats: tuple[str, ...]
    keyed: tuple[str, ...]
    objects: tuple[str, ...]
    whole: tuple[str, ...]
    endings: dict[str, str]
    fields: dict[str, tuple[str, ...]]
    kinds: dict[str, tuple[str, str]]
    names: dict[str, dict[str, str]]


TABLE = objects.table_beside(__file__, "formats.json", _Formats)
# Names of sources and languages become parts of file names.
NAME = re.compile(r"[\w@+-][\w.@+-]*", re.ASCII)
_UNFIT = re.compile(r"[^\w.@+-]+", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Source:
    """Raw files of one format.

        >>> gshard.Source("corpus/*.tsv.gz", language="es").format
        'tsv'

    Attributes:
      path: a file or a glob; a directory of gettext catalogs, or of "qt", "arb" or "properties"; a
        directory that `save_to_disk` of Hugging Face's datasets wrote; the prefix of Moses pairs;
        one of the two files of an indexed data set of Megatron.
        Files and prefixes may be within an archive, as in "corpus.zip/*.tsv".
      format: "tsv", "csv", "moses", "gettext", "tmx", "xliff", "qt", "arb", "properties", "sgm",
        "wmt", "jsonl", "parquet", "arrow", "megatron", "tfrecord", "array_record" or "text"; "":
        by the path's end.
      name: what shards and weights call the source; "": from the path.
      content: "pairs" or "text", which has no sources; "": "text" for that format and "megatron",
        else "pairs".
      tokens: "ids" if the fields of rows are lists of ids in place of text. `vocabulary.files` of
        the settings then names the vocabulary, as it does for "megatron".
      split: "train", "dev" or "test"; "": rows are divided by a hash of their target.
      language: language of rows and catalogs that name none; of formats that name both languages,
        such as Moses pairs, TMX and objects `translation`, the only one to read.
      target_language: language of the targets, for formats that name it.
      delimiter: what is between the fields of CSV: "comma", "tab" or "semicolon".
      document: unit of a document of text: "file", "line" or "paragraph".
      language_field: field or column of the language, for CSV, JSON lines, Parquet, Arrow and
        records of `tf.train.Example`. Dots reach into objects, as in "meta.lang".
      source_field: field or column of the source.
      target_field: field or column of the target.
      text_field: field or column of a text without a source.
    """

    path: str
    format: str = ""
    name: str = ""
    content: str = ""
    split: str = ""
    language: str = manifest.NO_LANGUAGE
    target_language: str = "en"
    document: str = text.PARAGRAPH
    delimiter: str = "comma"
    language_field: str = ""
    source_field: str = ""
    target_field: str = ""
    text_field: str = ""
    tokens: str = ""

    def __post_init__(self):
        """Completes format and name; ValueError if a value is wrong."""
        if not self.path:
            raise UserError(f"{self._flag()}: names no file")
        object.__setattr__(self, "format", self.format or self._format())
        usual = manifest.TEXT if self.format in (TEXT, MEGATRON) else manifest.PAIRS
        object.__setattr__(self, "content", self.content or usual)
        fields = {
            "format": (self.format, TABLE.formats),
            "content": (self.content, CONTENTS),
            "split": (self.split, ("", *readers.SPLITS)),
            "tokens": (self.tokens, ("", "ids")),
            "document": (self.document, text.DOCUMENTS),
            "delimiter": (self.delimiter, tuple(DELIMITERS)),
        }
        for field, (value, choices) in fields.items():
            if value not in choices:
                hint = names.nearest(value, [choice for choice in choices if choice])
                raise UserError(f"{self._flag()}: {field}={value} is unknown. {hint}")
        self._check_fields()
        for field, usual in {**TABLE.names[""], **TABLE.names.get(self.format, {})}.items():
            object.__setattr__(self, field, getattr(self, field) or usual)
        if self.format in (TEXT, MEGATRON) and self.content != manifest.TEXT:
            raise UserError(f"{self._flag()}: files of {self.format} have content=text, not pairs")
        object.__setattr__(self, "name", self.name or _name_from(self.path))
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"{self._flag()}: name={self.name} becomes part of file names: letters, digits and "
                "_ . @ + - were expected, and no dot at the beginning"
            )

    def _check_fields(self) -> None:
        """Raises ValueError if a field is given that has no effect."""
        for field in dataclasses.fields(self):
            formats = TABLE.fields.get(field.name, TABLE.formats)
            value = getattr(self, field.name)
            if value != field.default and self.format not in formats:
                raise UserError(
                    f"{self._flag()}: {field.name}={value} has no effect on format={self.format}; "
                    f"it applies to {' and '.join(formats)}"
                )

    @property
    def has_ids(self) -> bool:
        """Whether rows are token ids."""
        return self.tokens == "ids" or self.format == MEGATRON

    @classmethod
    def parse(cls, written: str) -> Source:
        """Returns the source of a path and field=value pairs, as in "data/train,format=moses".

        Raises:
          UserError: a field is unknown or has a wrong value.
        """
        path, *settings = written.split(",")
        fields = [field.name for field in dataclasses.fields(cls)][1:]
        given = {}
        for setting in settings:
            field, equals, value = setting.partition("=")
            if not equals:
                raise UserError(
                    f"`source={written}`: {setting!r} is not of the form field=value. Fields are "
                    f"{', '.join(fields)}"
                )
            names.check(field, fields, f"`source={written}`: unknown field {field!r}")
            given[field] = value
        return cls(os.path.expanduser(path), **given)

    def _format(self) -> str:
        _, ending = os.path.splitext(compression.without_suffix(self.path))
        # Files of TensorFlow may be numbered, as in "c4.tfrecord-00000-of-01024".
        if (known := ending.partition("-")[0]) in TABLE.endings:
            return TABLE.endings[known]
        if os.path.isdir(self.path):
            return ARROW if datasets.is_saved(self.path) else GETTEXT
        if archives.is_archive(self.path):
            raise UserError(
                f"{self._flag()}: name the files in the archive, as in {self.path}/*.tsv, or "
                f"{self.path}/PREFIX with format=moses"
            )
        raise UserError(
            f"{self._flag()}: the path does not say its format; add one of "
            f"{', '.join(f'format={name}' for name in TABLE.formats)}"
        )

    def _flag(self) -> str:
        return f"`source={self.path}`"


def _name_from(path: str) -> str:
    """Returns a name for a source whose user gave none."""
    stem = compression.without_suffix(os.path.basename(path.rstrip("/")))
    for ending in TABLE.endings:
        stem = stem.removesuffix(ending)
    if set("*?[") & set(stem):
        stem = os.path.basename(os.path.dirname(path)) if stem.strip("*?[].") == "" else stem
    return _UNFIT.sub("-", stem).strip("-.") or "corpus"


# Lines of a part. The number is fixed, so that parts do not depend on the number of workers.
PART_LINES = 1 << 16
_BLOCK = 1 << 22

# The places that a file may be cut at: after any line, between paragraphs, or nowhere.
LINES, PARAGRAPHS, NOWHERE = "lines", "paragraphs", "nowhere"


class Cut(msgspec.Struct, frozen=True):
    """A place where a part begins: first byte, and number of the first line, from 1."""

    offset: int
    line: int


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Facts on a file before its rows are read.

    Attributes:
      modified: time of its last change, in nanoseconds; 0 for a file in a bucket.
      sha256: digest of its bytes, as stored.
      lines: number of its lines; -1 if they were not counted.
      cuts: where its parts begin, the first at the file's beginning.
    """

    path: str
    bytes: int
    modified: int
    sha256: str
    lines: int
    cuts: list[Cut]

    def has_changed(self) -> bool:
        """Returns whether the file has changed since it was surveyed."""
        size, modified = _state(self.path)
        if (size, modified) == (self.bytes, self.modified):
            return False
        return size != self.bytes or survey(self.path, NOWHERE).sha256 != self.sha256


def survey(path: str, cut: str, counts_lines: bool = False) -> Survey:
    """Reads a file once for its digest and its cuts. A compressed file is not cut.

    Args:
      cut: where it may be cut: LINES, PARAGRAPHS or NOWHERE.
      counts_lines: whether to count the lines of a file that is compressed or not cut, too.

    Raises:
      OSError: the file cannot be read.
    """
    size, modified = _state(path)
    # Members of archives are not cut: they are compressed, or read from the archive's beginning.
    is_plain = path == compression.without_suffix(path) and archives.split(path) is None
    digest, cuts = hashlib.sha256(), _Cuts(cut if is_plain else NOWHERE)
    with archives.opened(path) as file:
        for block in _blocks(file):
            digest.update(block)
            if is_plain:
                cuts.add(block)
    lines = cuts.lines if is_plain else -1
    if counts_lines and not is_plain:
        lines = _compressed_lines(path)
    return Survey(
        path=path,
        bytes=size,
        modified=modified,
        sha256=digest.hexdigest(),
        lines=lines,
        cuts=cuts.found,
    )


def _state(path: str) -> tuple[int, int]:
    """Returns the size of a file, -1 if it is gone, and the time of its last change."""
    if is_bucket(path):
        size = objects.size_of(path)
        return -1 if size is None else size, 0
    if archives.split(path):
        return archives.state(path)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


class _Cuts:
    """Counts the lines of a file, given in blocks, and finds where it can be cut."""

    def __init__(self, kind: str):
        self._kind = kind
        self.found = [Cut(0, 1)]
        self._ended = self._position = 0
        self._ends_with_newline = True

    @property
    def lines(self) -> int:
        """Number of lines so far; the last one may lack its end."""
        return self._ended + (not self._ends_with_newline)

    def add(self, block: bytes) -> None:
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
        allowed = ends
        if self._kind == PARAGRAPHS:
            # Two line ends in a row are an empty line, which no paragraph has.
            previous = np.concatenate([[-1 if self._ends_with_newline else -2], ends[:-1]])
            allowed = ends[previous == ends - 1] if len(ends) else ends
        if self._kind != NOWHERE:
            self._cut(ends, allowed)
        self._ended += len(ends)
        self._position += len(block)
        self._ends_with_newline = block.endswith(b"\n")

    def _cut(self, ends: np.ndarray, allowed: np.ndarray) -> None:
        """Cuts after the first allowed line end that makes a part of PART_LINES or more."""
        while True:
            # Index, in this block, of the line end that completes the part.
            needed = self.found[-1].line + PART_LINES - 2 - self._ended
            if needed >= len(ends):
                return
            after = np.searchsorted(allowed, ends[max(needed, 0)])
            if after == len(allowed):
                return
            end = int(allowed[after])
            line = self._ended + int(np.searchsorted(ends, end)) + 2
            self.found.append(Cut(self._position + end + 1, line))


def _compressed_lines(path: str) -> int:
    """Returns the number of lines of a compressed file; -1 if it is damaged."""
    count, last = 0, b"\n"
    try:
        with archives.opened(path) as stored, compression.decompressed(path, stored) as file:
            for block in _blocks(file):
                count += block.count(b"\n")
                last = block[-1:]
    except compression.READ_ERRORS:
        return -1
    return count + (last != b"\n")


def _blocks(file) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block
