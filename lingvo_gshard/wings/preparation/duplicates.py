"""Removes the duplicates of a bucket, and groups its rows by split, language and source.

MinHash gives each row some keys, and similar rows share keys. Ranges of keys are worked on one by
one. First the keys that several rows have are found; then the rows that have such a key are brought
together and compared. So only keys, and texts of candidates, are written a second time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
import numpy as np

from lingvo_gshard.core.progress import Progress
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation import read_rows, row_files
from lingvo_gshard.wings.preparation.cleaning import near_duplicates
from lingvo_gshard.wings.preparation.cleaning.leaks import SeenInTrain, Wanted
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import NEAR_DUPLICATE, are_in, runs
from lingvo_gshard.wings.preparation.job import Job
from lingvo_gshard.wings.preparation.row_files import (
    UNIQUE_STAGE,
    BucketTask,
    Done,
    Example,
    Group,
    HeldOutTask,
    KeptRow,
    KeyedRow,
    Tally,
    bucket_file,
)


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


class BucketRecord(msgspec.Struct):
    """Counts of the rows of a bucket, by their fate.

    Attributes:
      tally: the duplicates.
      groups: the rows kept.
    """

    tally: Tally
    groups: list[Group]


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
        return f"{UNIQUE_STAGE}/{self.bucket:06d}"

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
                tally.leave_out(near_duplicates.DUPLICATE, row.language, example)
                continue
            seen.add(row.digest)
            kept = KeptRow(row.source, row.target, files.part, row.line)
            key = row.split, row.language, files.source, files.is_divided
            groups[key].append((row.digest, kept))
            if len(seen) % 4096 == 0:
                progress.update(len(seen), len(seen) / max(self.rows, len(seen)))
        progress.update(len(seen), 1.0)
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


NEAR_STAGE = "3-near"
# A candidate: key, place in the sources, number in the bucket, and place of the text in the file.
_CANDIDATE = np.dtype(
    [("key", "<u8"), ("part", "<u4"), ("line", "<u8"), ("bucket", "<u4"), ("number", "<u8")]
    + [("begin", "<u8"), ("size", "<u4")]
)
# Rows with the same key are in the order of the sources. Buckets follow each other by digests.
_ORDER = ("key", "part", "line", "bucket", "number")


@dataclasses.dataclass(frozen=True)
class KeyBucket(BucketTask):
    """Writes the sorted keys of the training rows of a bucket."""

    files = f"{NEAR_STAGE}/keys-"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the keys."""
        parts = [np.zeros(0, np.uint64)]
        for batch in self.batches(job, progress):
            parts.append(job.cleaner.near_duplicates.bands(batch.texts).ravel())
        job.work.save_array(self.name, np.sort(np.concatenate(parts)))
        return Done()


@dataclasses.dataclass(frozen=True)
class _RangeTask:
    """Base of tasks over the keys of one range.

    Attributes:
      files: the task's name in the work directory, without the number of the range.
      number: number of the range.
      ranges: number of ranges.
      buckets: number of buckets.
      rows: share of the stage's work.
    """

    files: ClassVar[str]
    number: int
    ranges: int
    buckets: int
    rows: int

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        return f"{self.files}{self.number:06d}"

    def load(self, job: Job, files: str) -> np.ndarray:
        """Returns what the files of all buckets have in the range.

        Args:
          job: the job.
          files: how the names of the files begin. A file holds sorted keys, or candidates sorted by
            key.
        """
        limits = _limits(self.ranges)[self.number : self.number + 2]
        found = []
        for bucket in range(self.buckets):
            path = job.work.file(f"{NEAR_STAGE}/{files}-{bucket:06d}.npy")
            part = np.load(path, mmap_mode="r")
            first, last = np.searchsorted(part["key"] if part.dtype.names else part, limits)
            found.append(np.asarray(part[first : last if self.number + 1 < self.ranges else None]))
        return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class CommonKeys(_RangeTask):
    """Finds the keys that several rows share, in one range of keys."""

    files = f"{NEAR_STAGE}/common-"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the keys, sorted."""
        unique, counts = np.unique(self.load(job, "keys"), return_counts=True)
        job.work.save_array(self.name, unique[counts > 1])
        progress.update(self.rows, 1.0)
        return Done()


@dataclasses.dataclass(frozen=True)
class CollectCandidates(BucketTask):
    """Writes the training rows of a bucket that have a key in common with other rows.

    Attributes:
      ranges: number of ranges of keys.
    """

    ranges: int

    files = f"{NEAR_STAGE}/candidates-"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the texts, and for each candidate key where its text is, ordered by key."""
        files = [job.work.file(f"{NEAR_STAGE}/common-{i:06d}.npy") for i in range(self.ranges)]
        # Ranges follow each other, so the whole is sorted.
        common = np.concatenate([np.load(file) for file in files])
        candidates, begin = [], 0
        with job.work.writing(f"{self.name}.texts") as file:
            for batch in self.batches(job, progress):
                texts = batch.texts
                keys = job.cleaner.near_duplicates.bands(texts)
                is_common = are_in(common, keys)
                for index in np.flatnonzero(is_common.any(axis=1)).tolist():
                    row, number = batch.rows[index], batch.first + index
                    content = msgspec.msgpack.encode(texts[index][:3])
                    place = row.part, row.line, self.bucket, number, begin, len(content)
                    candidates += [(k, *place) for k in keys[index, is_common[index]].tolist()]
                    begin += file.write(content)
        job.work.save_array(self.name, np.sort(np.array(candidates, _CANDIDATE), order="key"))
        return Done()


@dataclasses.dataclass(frozen=True)
class CompareCandidates(_RangeTask):
    """Compares the candidates that share a key of a range."""

    files = f"{NEAR_STAGE}/copies-"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes which rows are copies, as columns of bucket and number."""
        candidates = np.sort(self.load(job, "candidates"), order=_ORDER)
        texts, copies = _Texts(job, self.buckets), [np.zeros((0, 2), np.uint64)]
        for begin, end in runs(candidates["key"]):
            rows = candidates[begin:end]
            near = job.cleaner.near_duplicates.copies(map(texts.row, rows))
            copies.append(np.stack([rows["bucket"][near], rows["number"][near]], axis=1))
        job.work.save_array(self.name, np.unique(np.concatenate(copies).astype(np.uint64), axis=0))
        progress.update(self.rows, 1.0)
        return Done()


class NearCopies:
    """The near duplicates of a bucket."""

    def __init__(self, job: Job, bucket: int, buckets: int):
        """Loads what `CompareCandidates` has written for all ranges.

        Args:
          job: the job.
          bucket: number of the bucket.
          buckets: number of buckets.
        """
        found = set()
        for number in range(ranges_of(job, buckets)):
            copies = np.load(job.work.file(f"{NEAR_STAGE}/copies-{number:06d}.npy"))
            found.update(copies[copies[:, 0] == bucket, 1].tolist())
        self._numbers, self._next = found, 0

    def reasons(self, rows: Sequence[KeptRow]) -> list[str]:
        """Returns why each of the next training rows is left out; "" if it is not."""
        numbers = range(self._next, self._next + len(rows))
        self._next = numbers.stop
        return [NEAR_DUPLICATE if number in self._numbers else "" for number in numbers]


def ranges_of(job: Job, buckets: int) -> int:
    """Returns the number of ranges of keys.

    A range has as many candidates as a bucket has rows, if all rows are candidates.
    """
    return buckets * job.cleaner.near_duplicates.bands_of_row


class _Texts:
    """The texts of candidates, each read when it is compared."""

    def __init__(self, job: Job, buckets: int):
        names = (f"{NEAR_STAGE}/candidates-{bucket:06d}.texts" for bucket in range(buckets))
        paths = [job.work.file(name) for name in names]
        empty = np.zeros(0, np.uint8)
        # An empty file cannot be mapped into memory.
        self._texts = [np.memmap(p, mode="r") if p.stat().st_size else empty for p in paths]

    def row(self, candidate: np.void) -> Row:
        """Returns the row of a candidate."""
        begin, size = int(candidate["begin"]), int(candidate["size"])
        content = self._texts[int(candidate["bucket"])][begin : begin + size].tobytes()
        return Row(*msgspec.msgpack.decode(content))


def _limits(ranges: int) -> np.ndarray:
    """Returns the smallest key of each range and, for the last one, the largest of all."""
    steps = [(number << 64) // ranges for number in range(ranges)]
    return np.array([*steps, (1 << 64) - 1], np.uint64)


LEAK_STAGE = "3-leaks"


@dataclasses.dataclass(frozen=True)
class CollectWanted(HeldOutTask):
    """Collects the hashes of rows held out, from all buckets."""

    name: str = f"{LEAK_STAGE}/wanted"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the hashes."""
        parts = [Wanted.of(rows) for rows in self.texts(job, progress)]
        job.work.save_array(self.name, Wanted.merged(parts).hashes)
        return Done()


@dataclasses.dataclass(frozen=True)
class LookThrough(BucketTask):
    """Looks through the training rows of a bucket."""

    files = f"{LEAK_STAGE}/"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes which of the hashes the bucket has."""
        seen = SeenInTrain(Wanted(job.work.shared_array(CollectWanted.name)))
        for batch in self.batches(job, progress):
            seen.look_through(batch.texts)
        _save_bits(job, self.name, seen.is_seen)
        return Done()


@dataclasses.dataclass(frozen=True)
class MergeSeen:
    """Merges what was found in all buckets.

    Attributes:
      buckets: number of buckets.
      rows: 1, as it is one piece of work.
    """

    buckets: int
    rows: int = 1
    name: str = f"{LEAK_STAGE}/seen"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes which of the hashes any bucket has."""
        seen = np.zeros(len(job.work.shared_array(CollectWanted.name)), bool)
        for bucket in range(self.buckets):
            seen |= _load_bits(job, f"{LEAK_STAGE}/{bucket:06d}", len(seen))
        _save_bits(job, self.name, seen)
        return Done()


class Leaks:
    """The leaks that were found."""

    def __init__(self, job: Job):
        """Loads what `MergeSeen` has written."""
        wanted = job.work.shared_array(CollectWanted.name)
        self._seen = SeenInTrain(Wanted(wanted), _load_bits(job, f"{LEAK_STAGE}/seen", len(wanted)))

    def reasons(self, group: Group, rows: Sequence[KeptRow]) -> list[str]:
        """Returns why each row of a held-out group is left out; "" if it does not leak."""
        return self._seen.reasons(list(map(group.to_row, rows)))


def can_leak(group: Group) -> bool:
    """Returns whether a group was held out by a hash; a test set that was given stays as it is."""
    return group.is_divided and group.split != "train"


def _save_bits(job: Job, name: str, bits: np.ndarray) -> None:
    with job.work.writing(f"{name}.bits") as file:
        file.write(np.packbits(bits).tobytes())


def _load_bits(job: Job, name: str, count: int) -> np.ndarray:
    content = job.work.file(f"{name}.bits").read_bytes()
    return np.unpackbits(np.frombuffer(content, np.uint8), count=count).astype(bool)
