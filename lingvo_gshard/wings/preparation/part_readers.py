"""Part: a piece of raw files, and readers of parts, limited to spans and lengths of lines."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from array_record.python import array_record_module  # pyright: ignore
from google.protobuf import message

from lingvo_gshard.core import BucketError, Params, UserError, bounded_lines
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.data import Row, Vocabulary, compression, readers, text, tsv
from lingvo_gshard.wings.preparation import sources as source
from lingvo_gshard.wings.preparation import token_ids
from lingvo_gshard.wings.preparation.formats import (
    archives,
    fields,
    gettext,
    keyed,
    megatron,
    moses,
    qt,
    quoted,
    units,
)
from lingvo_gshard.wings.preparation.prepared import manifest

if TYPE_CHECKING:
    import pyarrow


class Span(msgspec.Struct, frozen=True):
    """Bytes of a file from `begin` to before `end`; None for the file's end."""

    path: str
    begin: int = 0
    end: int | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work for one reader. Parts are numbered in the order of the sources.

    Attributes:
      spans: what is read: of one file, or of the source and the target file of a pair.
      bytes: number of stored bytes.
    """

    number: int
    source: int
    spans: list[Span]
    first_line: int = 1
    language: str = ""
    bytes: int = 0


_BLOCK = 1 << 16
NO_OBJECT = "no JSON object"
NO_LANGUAGE = "no language code that can be part of a file's name"


class PartReader(readers.FileReader):
    """Base of readers of parts. Subclasses also derive from the reader of a format.

    Attributes:
      position: number of stored bytes read so far.
      vocabularies: of source and target, if rows are token ids.
    """

    vocabularies: Sequence[Vocabulary] = ()

    skip_setting = "`on_bad_row=skip`"

    def __init__(self, params: Params, part: Part, of: source.Source, longest_line: int):
        """Prepares to read a part of a source; longer lines, in bytes, are bad."""
        super().__init__(params.copy().set(train=(part.spans[0].path,)))
        self._piece, self._of, self._longest = part, of, longest_line
        self._spans: Mapping[str, Span] = {span.path: span for span in part.spans}
        self.first_line = part.first_line
        self.position = 0

    def part_rows(self) -> Iterator[Row]:
        """Yields the rows of the part; raises ValueError for a bad one if it is to be refused."""
        # Most rows have the language of a row before, so that each is checked once.
        known: set[str] = set()
        for row in self._read_file(self._piece.spans[0].path):
            if row.language not in known:
                if not source.NAME.fullmatch(row.language):
                    self._bad(f"{row.file}:{row.line}", NO_LANGUAGE, f"{row.language[:40]!r}")
                    continue
                known.add(row.language)
            if problem := token_ids.problem_of(row, self.vocabularies):
                self._bad(f"{row.file}:{row.line}", token_ids.UNKNOWN, problem)
                continue
            yield row

    def _raw_lines(self, path: str) -> Iterator[bytes | None]:
        span = self._spans[path]
        with archives.opened(path) as stored:
            stored.seek(span.begin)
            count = None if span.end is None else span.end - span.begin
            with compression.decompressed(path, stored) as file:
                for line in bounded_lines(file, count, self._longest):
                    yield line
                    self.position = stored.tell() - span.begin

    def _raw_blocks(self, path: str) -> Iterator[bytes]:
        with archives.opened(path) as stored, compression.decompressed(path, stored) as file:
            while block := file.read(_BLOCK):
                yield block
                self.position = stored.tell()

    def _longest_in_words(self) -> str:
        return f"max_line_bytes = {self._longest:,} bytes"


class _KeyedPart(PartReader, keyed.KeyedReader):
    """Base of readers of the messages of two files, one for each language."""

    def _units(self, path: str) -> Iterator[units.Unit]:
        yield from self.pair_units(path, self._piece.language, self._piece.spans[1].path)


class _TextPart(PartReader, text.TextReader):
    """Reads documents."""

    def _read_file(self, path: str) -> Iterator[Row]:
        for row in super()._read_file(path):
            yield row._replace(language=self._of.language)


class _MosesPart(PartReader, moses.MosesReader):
    """Reads pairs of lines from two files that have equally many."""

    def _read_file(self, path: str) -> Iterator[Row]:
        sources, targets = (self._lines(span.path) for span in self._piece.spans)
        # A file that is damaged ends early, which has been counted.
        for number, (left, right) in enumerate(
            zip(sources, targets, strict=False), self._piece.first_line
        ):
            if left is not None and right is not None:
                yield Row(self._piece.language, left, right, path, number)


class _MegatronPart(PartReader):
    """Reads documents of token ids. The part's spans count documents instead of bytes."""

    def _read_file(self, path: str) -> Iterator[Row]:
        span, index = self._piece.spans
        try:
            found = megatron.IndexedIds(path, index.path).read(span.begin, span.end)
            for number, ids in enumerate(found, self.first_line):
                yield Row(self._of.language, "", " ".join(map(str, ids)), path, number)
        except (OSError, UserError) as error:
            self._cannot_read(path, self.first_line, error)


class _ObjectsPart(PartReader):
    """Base of readers of objects with fields; a row's line is its number in the file."""

    def _read_file(self, path: str) -> Iterator[Row]:
        make = fields_of(self._of).rows
        for number, found in self._objects(path):
            place = f"{path}:{number}"
            rows = make(found, path, number)
            if isinstance(rows, str):
                self._bad(place, fields.NO_FIELD, rows)
            elif any(max(len(r.source), len(r.target)) > self._longest for r in rows):
                self._bad(place, readers.LONG_LINE, f"more than {self._longest_in_words()}")
            else:
                yield from rows

    @abc.abstractmethod
    def _objects(self, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yields the numbers of the objects of a file, and the objects."""


class _JsonLinesPart(_ObjectsPart):
    """Reads a JSON object from each line: a sentence pair, or a text."""

    def _objects(self, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        decode = msgspec.json.Decoder(dict).decode
        for number, line in enumerate(self._lines(path), self.first_line):
            if not line:
                continue
            try:
                found = decode(line)
            except (msgspec.MsgspecError, RecursionError) as error:
                self._bad(f"{path}:{number}", NO_OBJECT, str(error))
                continue
            yield number, found


def fields_of(of: source.Source) -> fields.Fields:
    """Returns the fields that a source's objects have."""
    names = [each.name for each in dataclasses.fields(fields.Fields) if each.name != "is_text"]
    values = {name: getattr(of, name) for name in names}
    return fields.Fields(is_text=of.content == manifest.TEXT, **values)


def make_reader(part: Part, of: source.Source, on_bad_row: str, longest_line: int) -> PartReader:
    """Returns the reader of a part of a source."""
    cls = _part_class(of.format)
    names_none = of.format in (*source.TABLE.objects, source.MEGATRON)
    settings = {} if names_none else languages_of(of)
    if of.format == source.TEXT:
        settings = {"document": of.document}
    if of.format == source.CSV:
        settings |= {"delimiter": of.delimiter, "language_field": of.language_field}
        settings |= {"source_field": of.source_field, "target_field": of.target_field}
        if of.content == manifest.TEXT:
            settings |= {"source_field": "", "target_field": of.text_field}
            settings["language"] = of.language
    return cls(cls.params().set(on_bad_row=on_bad_row, **settings), part, of, longest_line)


# The readers of whole files.
READERS: dict[str, type[readers.FileReader]] = {
    source.TSV: tsv.TsvReader,
    source.CSV: quoted.QuotedReader,
    source.MOSES: moses.MosesReader,
    source.GETTEXT: gettext.GettextReader,
    source.TMX: units.UnitReader,
    source.XLIFF: units.UnitReader,
    source.QT: qt.QtReader,
    source.ARB: keyed.ArbReader,
    source.PROPERTIES: keyed.PropertiesReader,
    source.SGM: keyed.SgmReader,
    source.WMT: units.WmtReader,
}


@functools.cache
def _part_class(form: str) -> type[PartReader]:
    """Returns the class of readers of parts of a format."""
    own = {
        source.TEXT: _TextPart,
        source.MOSES: _MosesPart,
        source.JSON_LINES: _JsonLinesPart,
        source.MEGATRON: _MegatronPart,
        source.PARQUET: ParquetPart,
        source.ARROW: ArrowPart,
        source.TFRECORD: _ExamplesPart,
        source.ARRAY_RECORD: _ExamplesPart,
    }
    if form in own:
        return own[form]
    reader, base = READERS[form], _KeyedPart if form in source.TABLE.keyed else PartReader
    made: Any = type(f"{reader.__name__}OfPart", (base, reader), {})
    return made


def languages_of(of: source.Source) -> dict[str, str]:
    """Returns the settings of the reader of a format that say which languages its files have."""
    language = "" if of.language == manifest.NO_LANGUAGE else of.language
    if of.format in (source.TSV, source.CSV):
        return {"language": language}
    name = "source_language" if of.format == source.MOSES else "language"
    return {name: language, "target_language": of.target_language}


_ROWS_AT_A_TIME = 4096


class _ColumnsPart(_ObjectsPart):
    """Base of readers of tables by columns."""

    @abc.abstractmethod
    def _batches(self, path: str) -> Iterator[pyarrow.RecordBatch]:
        """Yields the columns of the rows in batches; OSError or ArrowException for a bad file."""

    def _objects(self, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        # pyarrow starts threads, which processes that are forked would lack.
        import pyarrow

        numbers = itertools.count(self.first_line)
        try:
            for batch in self._batches(path):
                values = (_values(column) for column in batch.columns)
                for row in zip(*values, strict=True):
                    yield next(numbers), dict(zip(batch.schema.names, row, strict=True))
        except BucketError:
            raise
        except (pyarrow.ArrowException, OSError) as error:
            self._bad(f"{path}:{self.first_line}", "the file cannot be read", str(error))

    def _columns(self, path: str, schema: pyarrow.Schema, rows: int) -> list[str]:
        """Returns the columns to read of a file of some rows; none without texts, which is bad."""
        names = fields_of(self._of)
        if names.needed_columns.intersection(schema.names):
            return [name for name in schema.names if name in names.columns]
        found = ", ".join(f"{field.name} ({field.type})" for field in schema)
        self._bad(
            f"{path}:{self.first_line}",
            fields.NO_FIELD,
            f"expected columns of text {' and '.join(map(repr, names.texts))}; found "
            f"{found[:200] or 'none'}",
            count=rows,
        )
        return []


class ParquetPart(_ColumnsPart):
    """Reads rows of a Parquet file. The part's span counts row groups instead of bytes."""

    def _batches(self, path: str) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow
        import pyarrow.parquet

        span = self._piece.spans[0]
        with archives.opened(path) as stored, pyarrow.parquet.ParquetFile(stored) as file:
            schema, metadata = file.schema_arrow, file.metadata
            groups = range(span.begin, file.num_row_groups if span.end is None else span.end)
            rows = sum(metadata.row_group(group).num_rows for group in groups)
        columns = self._columns(path, schema, rows)
        if not columns:
            return
        texts = [name for name in columns if pyarrow.types.is_string(schema.field(name).type)]
        # A text that a page states once stays one text, however many rows have it.
        with (
            archives.opened(path) as stored,
            pyarrow.parquet.ParquetFile(stored, read_dictionary=texts) as file,
        ):
            yield from file.iter_batches(_ROWS_AT_A_TIME, groups, columns)


class ArrowPart(_ColumnsPart):
    """Reads rows of a file of a data set that Hugging Face's `save_to_disk` wrote."""

    def _batches(self, path: str) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow.ipc

        with archives.opened(path) as stored, pyarrow.ipc.open_stream(stored) as stream:
            # A stream does not say how many rows it has: only that there are some.
            columns = self._columns(path, stream.schema, 1)
            for batch in stream if columns else ():
                yield batch.select(columns)
                self.position = stored.tell()


class _ExamplesPart(_ObjectsPart):
    """Reads records of `tf.train.Example`, as T5's libraries write them."""

    def _objects(self, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        numbers = itertools.count(self.first_line)
        try:
            for record in self._records(path):
                yield next(numbers), _features(record)
        except (tf.errors.OpError, OSError, RuntimeError) as error:
            self._cannot_read(path, next(numbers), error)

    def _records(self, path: str) -> Iterator[bytes]:
        if self._of.format == source.ARRAY_RECORD:
            reader: Any = array_record_module.ArrayRecordReader(path)
            # A damaged file has no records, and reading one says why.
            yield from (reader.read() for _ in range(reader.num_records() or not reader.ok()))
        else:
            options = tf.io.TFRecordOptions("GZIP" if path.endswith(".gz") else "")
            yield from tf.compat.v1.io.tf_record_iterator(path, options)


def _features(record: bytes) -> dict[str, Any]:
    """Returns the values of a record: a text, or a list. Bytes that are no record have none."""
    found: dict[str, Any] = {}
    with contextlib.suppress(message.DecodeError):
        for name, feature in tf.train.Example.FromString(record).features.feature.items():
            kind = feature.WhichOneof("kind")
            found[name] = list(getattr(feature, kind).value) if kind else []
            if kind == "bytes_list" and len(found[name]) == 1:
                with contextlib.suppress(UnicodeDecodeError):
                    found[name] = found[name][0].decode()
    return found


def _values(column: pyarrow.Array) -> list[object]:
    """Returns the values of a column. Rows with the same text share one string."""
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        return column.to_pylist()
    texts = column.dictionary.to_pylist()
    return [None if index is None else texts[index] for index in column.indices.to_pylist()]


def row_groups(path: str) -> list[int]:
    """Returns the number of rows of each row group; none if the file is damaged."""
    import pyarrow
    import pyarrow.parquet

    try:
        with archives.opened(path) as stored, pyarrow.parquet.ParquetFile(stored) as file:
            metadata = file.metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except BucketError:
        raise
    except (pyarrow.ArrowException, OSError):
        return []
