"""Files of rows, ordered by digest. Readers read any range of digests."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple, TypeAlias

import msgspec
import numpy as np

from lingvo_gshard.core import Progress
from lingvo_gshard.data import Row, excerpt
from lingvo_gshard.wings.preparation.job import Job

# Digests are divided by their first 12 bits. A bucket is a range of digests, not of hash values
# modulo a number. Buckets can therefore be chosen after all rows are counted, and they follow the
# order of digests.
RANGES = 1 << 12
_BITS_LEFT = 4


class KeyedRow(NamedTuple):
    """A row with its digest: rows are equal if and only if their digests are.

    `source` is "" for a text. `line` orders equal rows.
    """

    digest: bytes
    language: str
    source: str
    target: str
    split: str
    line: int


def write_rows(file: IO[bytes], rows: Sequence[KeyedRow]) -> np.ndarray:
    """Writes rows in the order of their digests. Returns the bytes of each range of digests."""
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


# The groups of each bucket that are worked on.
Groups: TypeAlias = Sequence[Sequence["Group"]]


def batches(
    job: Job, progress: Progress, bucket: int, groups: Sequence[Group]
) -> Iterator[tuple[int, list[KeptRow], list[Row]]]:
    """Yields the rows of groups of a bucket in batches, and reports progress after each.

    A batch is a tuple: the number of the first row, the rows as they are stored, and the rows as
    cleaning takes them.
    """
    done, total = 0, rows_in(groups)
    for group in groups:
        rows = read_group(job, bucket, group)
        for begin in range(0, len(rows), _ROWS_AT_A_TIME):
            part = rows[begin : begin + _ROWS_AT_A_TIME]
            yield done, part, list(map(group.to_row, part))
            done += len(part)
            progress.update(done, done / total)


def rows_in(groups: Iterable[GroupPlace]) -> int:
    """Returns the number of rows of groups."""
    return sum(group.rows for group in groups)


_EXAMPLES = 3


class Example(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A row that was left out.

    `line` may be another number that orders the rows of a part. `text` says where it is and what is
    wrong with it.
    """

    part: int
    line: int
    text: str

    @classmethod
    def of_row(cls, part: int, file: str, line: int, text: str) -> Example:
        """Returns the example of a row: where it is, and the beginning of one of its texts."""
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
    """A row that is kept, and where it was read: number of the part, and line."""

    source: str
    target: str
    part: int
    line: int


class GroupPlace(msgspec.Struct, kw_only=True):
    """The place of rows of a bucket with the same split, language and source in its file."""

    split: str
    language: str
    source: str
    rows: int
    begin: int


class Group(GroupPlace, kw_only=True):
    """Rows of a bucket with the same split, language and source, in the order of their digests.

    `is_divided` says whether the split was chosen by a hash. `size` counts bytes.
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
