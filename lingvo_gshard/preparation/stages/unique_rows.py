"""Removes the duplicates of a bucket, and groups its rows by split, language and source."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import msgspec

from lingvo_gshard.data.cleaning import duplicates
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.preparation.job import Job, Progress
from lingvo_gshard.preparation.stages import read_rows, row_files
from lingvo_gshard.preparation.stages.row_files import KeyedRow
from lingvo_gshard.preparation.stages.tally import Example, Tally

STAGE = "2-unique"


class PartFiles(msgspec.Struct, frozen=True):
    """The files of rows of a part.

    Attributes:
      part: number of the part.
      source: name of its source.
      is_divided: whether its rows are divided into splits by a hash.
      path: the raw file.
      chunks: number of files of rows.
    """

    part: int
    source: str
    is_divided: bool
    path: str
    chunks: int


class KeptRow(msgspec.Struct, array_like=True, gc=False):
    """A row that is kept.

    Attributes:
      source: the sentence, or "".
      target: its translation, or a text.
      part: number of the part it was read from.
      line: number of its line.
    """

    source: str
    target: str
    part: int
    line: int


class Group(msgspec.Struct, kw_only=True):
    """Rows of a bucket with the same split, language and source, in the order of their digests.

    Attributes:
      split: the split.
      language: language of the rows.
      source: name of the source.
      is_divided: whether the split was chosen by a hash.
      rows: number of rows.
      characters: number of characters.
      begin: first byte in the bucket's file.
      size: number of bytes.
    """

    split: str
    language: str
    source: str
    is_divided: bool
    rows: int
    characters: int
    begin: int
    size: int

    def to_row(self, row: KeptRow) -> Row:
        """Returns a row of the group as cleaning takes it."""
        return Row(self.language, row.source, row.target)


class BucketRecord(msgspec.Struct):
    """Counts of the rows of a bucket, by their fate.

    Attributes:
      tally: the duplicates.
      groups: the rows kept.
    """

    tally: Tally
    groups: list[Group]


def bucket_file(bucket: int) -> str:
    """Returns the name of a bucket's file in the work directory."""
    return f"{STAGE}/{bucket:06d}.rows"


@dataclasses.dataclass(frozen=True)
class UniqueRows:
    """Removes the duplicates of one bucket. The first row in the order of the sources stays.

    Attributes:
      bucket: number of the bucket.
      begin: first range of digests.
      end: the range after the last one.
      parts: the files of rows of all parts, in the order of the parts.
      rows: expected number of rows.
    """

    bucket: int
    begin: int
    end: int
    parts: tuple[PartFiles, ...]
    rows: int

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        return f"{STAGE}/{self.bucket:06d}"

    def run(self, job: Job, progress: Progress) -> BucketRecord:
        """Writes the rows that stay. Returns where their groups are, and counts of duplicates."""
        tally = Tally()
        groups: dict[tuple[str, str, str, bool], list[tuple[bytes, KeptRow]]] = (
            collections.defaultdict(list)
        )
        seen = set()
        for files, row in self._rows(job):
            if row.digest in seen:
                text = row.source or row.target
                example = Example.of_row(files.part, files.path, row.line, text)
                tally.leave_out(duplicates.REASON, row.language, example)
                continue
            seen.add(row.digest)
            kept = KeptRow(row.source, row.target, files.part, row.line)
            key = row.split, row.language, files.source, files.is_divided
            groups[key].append((row.digest, kept))
            if len(seen) % 4096 == 0:
                progress(4096, len(seen) / max(self.rows, len(seen)))
        progress(len(seen) % 4096, 1.0)
        record = BucketRecord(tally, [])
        with job.work.writing(bucket_file(self.bucket)) as file:
            for key, rows in sorted(groups.items(), key=lambda item: item[0]):
                split, language, source, is_divided = key
                rows.sort(key=lambda row: row[0])
                content = msgspec.msgpack.encode([kept for _, kept in rows])
                record.groups.append(
                    Group(
                        split=split,
                        language=language,
                        source=source,
                        is_divided=is_divided,
                        rows=len(rows),
                        characters=sum(len(row.source) + len(row.target) for _, row in rows),
                        begin=file.tell(),
                        size=len(content),
                    )
                )
                file.write(content)
        return record

    def _rows(self, job: Job) -> Iterator[tuple[PartFiles, KeyedRow]]:
        for files in self.parts:
            for chunk in range(files.chunks):
                path = job.work.file(read_rows.chunk_file(files.part, chunk))
                for row in row_files.read_rows(path, self.begin, self.end):
                    yield files, row


def read_group(job: Job, bucket: int, group: Group) -> list[KeptRow]:
    """Returns the rows of a group of a bucket."""
    with open(job.work.file(bucket_file(bucket)), "rb") as file:
        file.seek(group.begin)
        return msgspec.msgpack.decode(file.read(group.size), type=list[KeptRow])
