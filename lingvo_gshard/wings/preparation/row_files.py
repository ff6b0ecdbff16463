"""Files of rows, ordered by digest. Readers read any range of digests."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import IO, ClassVar, NamedTuple

import msgspec
import numpy as np

from lingvo_gshard.core.progress import Progress
from lingvo_gshard.data.sources.report import excerpt
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.job import Job

# Digests are divided by their first 12 bits. A bucket is a range of digests, not of hash values
# modulo a number. Buckets can therefore be chosen after all rows are counted, and they follow the
# order of digests.
RANGES = 1 << 12
_BITS_LEFT = 4


class KeyedRow(NamedTuple):
    """A row with its digest.

    Attributes:
      digest: rows are equal if and only if their digests are.
      language: language of the row.
      source: the sentence, or "".
      target: its translation, or a text.
      split: "train", "dev" or "test".
      line: number of the row in its part, which orders equal rows.
    """

    digest: bytes
    language: str
    source: str
    target: str
    split: str
    line: int


def write_rows(file: IO[bytes], rows: Sequence[KeyedRow]) -> np.ndarray:
    """Writes rows in the order of their digests.

    Returns:
      The number of bytes of each range of digests.
    """
    ordered = sorted(rows)
    prefixes = np.frombuffer(b"".join([row.digest[:2] for row in ordered]), ">u2") >> _BITS_LEFT
    begins = np.searchsorted(prefixes, np.arange(RANGES + 1))
    encode = msgspec.msgpack.Encoder().encode
    blobs = [
        encode(ordered[begin:end]) if begin < end else b""
        for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    ]
    sizes = np.fromiter(map(len, blobs), np.int64, RANGES)
    file.write(sizes.astype("<u4").tobytes())
    file.writelines(blobs)
    return sizes


def read_rows(path: pathlib.Path, begin: int, end: int) -> Iterator[KeyedRow]:
    """Yields the rows of the ranges of digests from `begin` to `end`, which is excluded."""
    decode = msgspec.msgpack.Decoder(list[KeyedRow]).decode
    with open(path, "rb") as file:
        sizes = np.frombuffer(file.read(4 * RANGES), "<u4").astype(np.int64)
        file.seek(4 * RANGES + int(sizes[:begin].sum()))
        for size in sizes[begin:end].tolist():
            if size:
                yield from decode(file.read(size))


_ROWS_AT_A_TIME = 4096


class Done(msgspec.Struct):
    """Records that a task is finished. Its result is in a file."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some rows of a group that are worked on together.

    Attributes:
      group: the group.
      first: number of the first row among all rows of the task.
      rows: the rows.
    """

    group: Group
    first: int
    rows: list[KeptRow]

    @property
    def texts(self) -> list[Row]:
        """The rows as cleaning takes them."""
        return list(map(self.group.to_row, self.rows))


@dataclasses.dataclass(frozen=True)
class BucketTask:
    """Base of tasks over rows of one bucket.

    Attributes:
      files: the task's name in the work directory, without the number of the bucket.
      bucket: number of the bucket.
      groups: the groups of the bucket that the task works on.
    """

    files: ClassVar[str]
    bucket: int
    groups: tuple[Group, ...]

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        return f"{self.files}{self.bucket:06d}"

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for group in self.groups)

    def batches(self, job: Job, progress: Progress) -> Iterator[Batch]:
        """Yields all rows in batches, and reports progress after each batch."""
        done, total = 0, self.rows
        for group in self.groups:
            rows = read_group(job, self.bucket, group)
            for begin in range(0, len(rows), _ROWS_AT_A_TIME):
                part = rows[begin : begin + _ROWS_AT_A_TIME]
                yield Batch(group, done, part)
                done += len(part)
                progress.update(done, done / total)


@dataclasses.dataclass(frozen=True)
class HeldOutTask:
    """Base of tasks over the rows held out in all buckets.

    Attributes:
      buckets: the groups that are held out, by bucket.
    """

    buckets: tuple[tuple[Group, ...], ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for groups in self.buckets for group in groups)

    def texts(self, job: Job, progress: Progress) -> Iterator[list[Row]]:
        """Yields the rows of each bucket, and reports progress after each."""
        done = 0
        for bucket, groups in enumerate(self.buckets):
            rows = [group.to_row(row) for group in groups for row in read_group(job, bucket, group)]
            yield rows
            done += len(rows)
            progress.update(done, done / max(1, self.rows))


_EXAMPLES = 3


class Example(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A row that was left out.

    Attributes:
      part: number of the part it is in.
      line: its line, or another number that orders the rows of a part.
      text: where it is and what is wrong with it.
    """

    part: int
    line: int
    text: str

    @classmethod
    def of_row(cls, part: int, file: str, line: int, text: str) -> Example:
        """Returns the example of a row: where it is, and the beginning of its text.

        Args:
          part: number of the part it is in.
          file: the raw file.
          line: its line.
          text: one of its texts.
        """
        return cls(part, line, f"{file}:{line}: {excerpt(text)}")


class Tally(msgspec.Struct):
    """Counts of rows. Tallies of parts are added up in any order, with the same result.

    Attributes:
      read: language -> number of rows read.
      rejected: reason -> language -> number of rows left out; "" if the language is not known.
      examples: reason -> the first rows left out for it, in the order of the sources.
      rewritten: kind of change -> number of texts changed.
    """

    read: dict[str, int] = {}
    rejected: dict[str, dict[str, int]] = {}
    examples: dict[str, list[Example]] = {}
    rewritten: dict[str, int] = {}

    def count_read(self, language: str, count: int = 1) -> None:
        """Counts rows that were read."""
        self.read[language] = self.read.get(language, 0) + count

    def reject(self, reason: str, language: str, count: int = 1) -> None:
        """Counts rows that are left out."""
        languages = self.rejected.setdefault(reason, {})
        languages[language] = languages.get(language, 0) + count

    def leave_out(self, reason: str, language: str, example: Example, count: int = 1) -> None:
        """Counts rows that are left out, and keeps the example if it is among the first."""
        self.reject(reason, language, count)
        self.show(reason, example)

    def show(self, reason: str, example: Example) -> None:
        """Keeps an example if it is among the first."""
        kept = self.examples.setdefault(reason, [])
        if len(kept) < _EXAMPLES or example < kept[-1]:
            self.examples[reason] = sorted({*kept, example})[:_EXAMPLES]

    def rewrite(self, kind: str, count: int) -> None:
        """Counts texts that were changed."""
        self.rewritten[kind] = self.rewritten.get(kind, 0) + count

    def add(self, other: Tally) -> None:
        """Adds the counts of other rows."""
        for language, count in other.read.items():
            self.count_read(language, count)
        for reason, languages in other.rejected.items():
            for language, count in languages.items():
                self.reject(reason, language, count)
        for reason, examples in other.examples.items():
            for example in examples:
                self.show(reason, example)
        for kind, count in other.rewritten.items():
            self.rewrite(kind, count)

    @property
    def rejected_rows(self) -> dict[str, int]:
        """Reason -> number of rows left out."""
        return {reason: sum(counts.values()) for reason, counts in self.rejected.items()}


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


class GroupPlace(msgspec.Struct, kw_only=True):
    """Names the place of rows of a bucket with the same split, language and source.

    Attributes:
      split: the split.
      language: language of the rows.
      source: name of the source.
      rows: number of rows.
      begin: first byte in the bucket's file.
    """

    split: str
    language: str
    source: str
    rows: int
    begin: int


class Group(GroupPlace, kw_only=True):
    """Rows of a bucket with the same split, language and source, in the order of their digests.

    Attributes:
      is_divided: whether the split was chosen by a hash.
      characters: number of characters.
      size: number of bytes.
    """

    is_divided: bool
    characters: int
    size: int

    def to_row(self, row: KeptRow) -> Row:
        """Returns a row of the group as cleaning takes it."""
        return Row(self.language, row.source, row.target)


def read_group(job: Job, bucket: int, group: Group) -> list[KeptRow]:
    """Returns the rows of a group of a bucket."""
    with open(job.work.file(bucket_file(bucket)), "rb") as file:
        file.seek(group.begin)
        return msgspec.msgpack.decode(file.read(group.size), type=list[KeptRow])


UNIQUE_STAGE = "2-unique"


def bucket_file(bucket: int) -> str:
    """Returns the name of a bucket's file in the work directory."""
    return f"{UNIQUE_STAGE}/{bucket:06d}.rows"
