"""Part: what is read of raw files as one piece of work."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import importlib.util
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lingvo_gshard.core import Progress, UserError, is_bucket, objects
from lingvo_gshard.data import text, tsv
from lingvo_gshard.wings.preparation import part_readers
from lingvo_gshard.wings.preparation import sources as formats
from lingvo_gshard.wings.preparation.formats import archives, datasets, keyed, megatron, moses
from lingvo_gshard.wings.preparation.job import Job, Task
from lingvo_gshard.wings.preparation.sources import Cut, Source, Survey

STAGE = "0-files"
# Formats whose files are cut at any end of a line.
_CUT = (formats.TSV, formats.MOSES, formats.JSON_LINES)
# Formats whose readers look for files themselves. Others have paths and globs only.
_FINDING = (formats.MOSES, formats.GETTEXT, formats.QT, *formats.TABLE.keyed)


@dataclasses.dataclass(frozen=True)
class Files:
    """One file of a source, or the source and the target file of a pair in a language."""

    source: int
    paths: tuple[str, ...]
    language: str = ""


def survey_file(task: Task, job: Job, progress: Progress, path: str, source: Source) -> Survey:
    """Returns the survey of a file of a source."""
    del task, job, progress
    cut = formats.LINES if source.format in _CUT else formats.NOWHERE
    if source.format == formats.TEXT:
        cuts = {text.LINE: formats.LINES, text.PARAGRAPH: formats.PARAGRAPHS}
        cut = cuts.get(source.document, formats.NOWHERE)
    found = formats.survey(path, cut, source.format == formats.MOSES)
    if source.format == formats.MEGATRON:
        return _with_documents(found)
    return _with_row_groups(found) if source.format == formats.PARQUET else found


def survey_name(path: str) -> str:
    """Returns the name of the survey of a file in the work directory."""
    # The number of a file would change if another one were added.
    return f"{STAGE}/{hashlib.sha256(path.encode()).hexdigest()[:32]}"


def find_files(sources: Sequence[Source]) -> tuple[list[Files], list[str]]:
    """Returns the files of all sources, in their order, and lines about files that are not read.

    Raises:
      UserError: a file is missing, or a glob matches none. The message names the source.
    """
    notes: dict[str, None] = {}
    found = [
        files for number, source in enumerate(sources) for files in _find(number, source, notes)
    ]
    return found, list(notes)


def parts_of(
    files: Sequence[Files], surveys: dict[str, Survey], sources: Sequence[Source]
) -> Iterator[part_readers.Part]:
    """Yields the parts of files, numbered in the order of the files."""
    numbers = itertools.count()
    for entry in files:
        surveyed = [surveys[path] for path in entry.paths]
        cuts = surveyed[0].cuts
        for index, cut in enumerate(cuts):
            spans = [_span(one, index) for one in surveyed]
            size = (spans[0].end or surveyed[0].bytes) - cut.offset
            if sources[entry.source].format in (formats.PARQUET, formats.MEGATRON):
                size = surveyed[0].bytes // len(cuts)
            yield part_readers.Part(
                number=next(numbers),
                source=entry.source,
                spans=spans,
                first_line=cut.line,
                language=entry.language,
                bytes=size,
            )


def _span(surveyed: Survey, index: int) -> part_readers.Span:
    """Returns the bytes between a cut and the next one."""
    following = surveyed.cuts[index + 1 : index + 2]
    return part_readers.Span(
        surveyed.path, surveyed.cuts[index].offset, following[0].offset if following else None
    )


def unequal(files: Files, surveys: dict[str, Survey]) -> str:
    """Returns what is wrong with Moses pairs whose sides differ in length; "" if nothing is."""
    lines = {path: surveys[path].lines for path in files.paths}
    # A damaged file has no count. Reading reports it.
    if min(lines.values()) in (max(lines.values()), -1):
        return ""
    place, detail = moses.difference(lines)
    return f"{place}: {moses.UNEQUAL}: {detail}"


def _find(number: int, source: Source, notes: dict[str, None]) -> Iterator[Files]:
    """Yields the files of a source, and adds lines about files that are not read to the notes."""
    setting = f"`source={source.path}`"
    tables = (formats.PARQUET, formats.ARROW)
    if source.format in tables and importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            f"{setting}: files of format={source.format} need pyarrow: pip install pyarrow"
        )
    if is_bucket(source.path):
        yield from (Files(number, (path,)) for path in _find_in_bucket(source, setting))
        return
    inside = archives.split(source.path)
    if inside:
        yield from _find_in_archive(number, source, setting, *inside)
        return
    if source.format == formats.ARROW and datasets.is_saved(source.path):
        yield from (Files(number, (path,)) for path in datasets.saved_files(source.path, setting))
        return
    reader = _reader(source)
    if source.format == formats.MEGATRON:
        pairs = dict.fromkeys(map(megatron.pair, reader.files("train", setting)))
        if missing := [path for both in pairs for path in both if not os.path.isfile(path)]:
            raise UserError(f"{setting}: {missing[0]} is missing")
        yield from (Files(number, both) for both in pairs)
        return
    for path in reader.files("train", setting):
        if isinstance(reader, moses.MosesReader):
            for language, other in reader.sources_of(path):
                yield Files(number, (other, path), language)
        elif isinstance(reader, keyed.KeyedReader):
            yield from _keyed(number, reader, path)
        else:
            yield Files(number, (path,))
    notes |= dict.fromkeys(reader.file_notes)


def _keyed(
    number: int, reader: keyed.KeyedReader, path: str, siblings: Sequence[str] | None = None
) -> Iterator[Files]:
    """Yields a file of messages and the file of its targets, unless it has targets itself."""
    pair = reader.pair(path, siblings)
    if pair is not None:
        yield Files(number, (path, pair[1]), pair[0])


def _find_in_archive(
    number: int, source: Source, setting: str, archive: str, pattern: str
) -> Iterator[Files]:
    """Yields the files of a source in an archive; UserError if there is none."""
    if source.format in formats.TABLE.whole:
        what = f"files of format={source.format}"
        raise UserError(f"{setting}: {what} are not read from archives; unpack it")
    if source.format in formats.TABLE.keyed:
        members = [f"{archive}/{name}" for name in sorted(archives.members(archive))]
        found = [
            files
            for path in archives.glob(archive, pattern)
            for files in _keyed(number, _reader(source), path, members)
        ]
    elif source.format != formats.MOSES:
        found = [Files(number, (path,)) for path in archives.glob(archive, pattern)]
    else:
        names = sorted(archives.members(archive))
        end = f".{source.target_language}"
        prefixes = [name.removesuffix(end) for name in names if name.endswith(end)]
        found = [
            Files(number, (f"{archive}/{other}", f"{archive}/{prefix}{end}"), language)
            for prefix in prefixes
            if fnmatch.fnmatchcase(prefix, pattern)
            for language, other in _reader(source).sides(prefix, names).items()
        ]
    if not found:
        raise UserError(f"{setting}: there is no such file in {archive}")
    yield from found


def _find_in_bucket(source: Source, setting: str) -> list[str]:
    """Returns the files of a source in a bucket; ValueError if there is none."""
    if source.format in (formats.MOSES, *formats.TABLE.whole, *formats.TABLE.keyed):
        raise UserError(
            f"{setting}: files of format={source.format} are read from local disks only; copy them "
            "to one first"
        )
    found = [path for path in objects.glob(source.path) if objects.is_file(path)]
    if not found:
        raise UserError(f"{setting}: there is no such file in the bucket")
    return found


def _reader(source: Source) -> Any:
    """Returns the reader that finds the whole files of a source."""
    if source.format not in _FINDING:
        return tsv.TsvReader(tsv.TsvReader.params().set(train=(source.path,)))
    cls = part_readers.READERS[source.format]
    return cls(cls.params().set(train=(source.path,), **part_readers.languages_of(source)))


def _with_documents(found: Survey) -> Survey:
    """Returns the survey of a file of an indexed data set, cut between documents."""
    try:
        count = megatron.IndexedIds(*megatron.pair(found.path)).documents
    except (OSError, UserError):
        count = 1
    starts = range(0, max(count, 1), formats.PART_LINES)
    return msgspec.structs.replace(found, cuts=[Cut(first, first + 1) for first in starts])


def _with_row_groups(found: Survey) -> Survey:
    """Returns the survey of a Parquet file with its row groups as parts."""
    rows = part_readers.row_groups(found.path)
    firsts = [1, *itertools.accumulate(rows, initial=1)][1:-1] if rows else [1]
    cuts = [Cut(group, first) for group, first in enumerate(firsts)]
    return msgspec.structs.replace(found, lines=sum(rows), cuts=cuts)
