"""Finds near duplicates among the training rows of all buckets.

MinHash gives each row some keys, and similar rows share keys. Ranges of keys are worked on one by
one. First the keys that several rows have are found; then the rows that have such a key are brought
together and compared. So only keys, and texts of candidates, are written a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from lingvo_gshard.data.cleaning.near_duplicates import REASON, runs
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.preparation.job import Job, Progress
from lingvo_gshard.preparation.stages.bucket_tasks import BucketTask, Done
from lingvo_gshard.preparation.stages.tally import Example, Tally
from lingvo_gshard.preparation.stages.unique_rows import Group, KeptRow

STAGE = "3-near"
# A candidate: its key, where it was read, its number in its bucket, and its text in the file.
_CANDIDATE = np.dtype(
    [("key", "<u8"), ("part", "<u4"), ("line", "<u8"), ("bucket", "<u4"), ("number", "<u8")]
    + [("begin", "<u8"), ("size", "<u4")]
)
# Rows with the same key are in the order of the sources. Buckets follow each other by digests.
_ORDER = ("key", "part", "line", "bucket", "number")


@dataclasses.dataclass(frozen=True)
class KeyBucket(BucketTask):
    """Writes the sorted keys of the training rows of a bucket."""

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        return f"{STAGE}/keys-{self.bucket:06d}"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the keys."""
        parts = [np.zeros(0, np.uint64)]
        for batch in self.batches(job, progress):
            parts.append(job.cleaner.near_duplicates.bands(batch.texts).ravel())
        with job.work.writing(f"{self.name}.npy") as file:
            np.save(file, np.sort(np.concatenate(parts)))
        return Done()


@dataclasses.dataclass(frozen=True)
class _RangeTask:
    """Base of tasks over the keys of one range.

    Attributes:
      number: number of the range.
      ranges: number of ranges.
      buckets: number of buckets.
      rows: share of the stage's work.
    """

    number: int
    ranges: int
    buckets: int
    rows: int

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
            path = job.work.file(f"{STAGE}/{files}-{bucket:06d}.npy")
            part = np.load(path, mmap_mode="r")
            first, last = np.searchsorted(part["key"] if part.dtype.names else part, limits)
            found.append(np.asarray(part[first : last if self.number + 1 < self.ranges else None]))
        return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class CommonKeys(_RangeTask):
    """Finds the keys that several rows share, in one range of keys."""

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        return f"{STAGE}/common-{self.number:06d}"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the keys, sorted."""
        unique, counts = np.unique(self.load(job, "keys"), return_counts=True)
        with job.work.writing(f"{self.name}.npy") as file:
            np.save(file, unique[counts > 1])
        progress(self.rows, 1.0)
        return Done()


@dataclasses.dataclass(frozen=True)
class CollectCandidates(BucketTask):
    """Writes the training rows of a bucket that have a key in common with other rows.

    Attributes:
      ranges: number of ranges of keys.
    """

    ranges: int

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        return f"{STAGE}/candidates-{self.bucket:06d}"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the texts, and for each candidate key where its text is, ordered by key."""
        files = [job.work.file(f"{STAGE}/common-{i:06d}.npy") for i in range(self.ranges)]
        # Ranges follow each other, so the whole is sorted.
        common = np.concatenate([np.load(file) for file in files])
        candidates, begin = [], 0
        with job.work.writing(f"{self.name}.texts") as file:
            for batch in self.batches(job, progress):
                texts = batch.texts
                keys = job.cleaner.near_duplicates.bands(texts)
                is_common = _are_in(common, keys)
                for index in np.flatnonzero(is_common.any(axis=1)).tolist():
                    row, number = batch.rows[index], batch.first + index
                    content = msgspec.msgpack.encode(texts[index][:3])
                    place = row.part, row.line, self.bucket, number, begin, len(content)
                    candidates += [(k, *place) for k in keys[index, is_common[index]].tolist()]
                    begin += file.write(content)
        with job.work.writing(f"{self.name}.npy") as file:
            np.save(file, np.sort(np.array(candidates, _CANDIDATE), order="key"))
        return Done()


@dataclasses.dataclass(frozen=True)
class CompareCandidates(_RangeTask):
    """Compares the candidates that share a key of a range."""

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        return f"{STAGE}/copies-{self.number:06d}"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes which rows are copies, as columns of bucket and number."""
        candidates = np.sort(self.load(job, "candidates"), order=_ORDER)
        texts, copies = _Texts(job, self.buckets), [np.zeros((0, 2), np.uint64)]
        for begin, end in runs(candidates["key"]):
            rows = candidates[begin:end]
            near = job.cleaner.near_duplicates.copies(map(texts.row, rows))
            copies.append(np.stack([rows["bucket"][near], rows["number"][near]], axis=1))
        with job.work.writing(f"{self.name}.npy") as file:
            np.save(file, np.unique(np.concatenate(copies).astype(np.uint64), axis=0))
        progress(self.rows, 1.0)
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
            copies = np.load(job.work.file(f"{STAGE}/copies-{number:06d}.npy"))
            found.update(copies[copies[:, 0] == bucket, 1].tolist())
        self._numbers, self._next = found, 0

    def without(
        self, group: Group, rows: Sequence[KeptRow], paths: Sequence[str], tally: Tally
    ) -> list[KeptRow]:
        """Returns the rows of the next group of training rows, and counts the near duplicates.

        Args:
          group: the group.
          rows: its rows.
          paths: the raw file of each part, for examples.
          tally: counts the rows left out.
        """
        kept = []
        for number, row in enumerate(rows, self._next):
            if number not in self._numbers:
                kept.append(row)
                continue
            text = row.source or row.target
            example = Example.of_row(row.part, paths[row.part], row.line, text)
            tally.leave_out(REASON, group.language, example)
        self._next += len(rows)
        return kept


def ranges_of(job: Job, buckets: int) -> int:
    """Returns the number of ranges of keys.

    A range has as many candidates as a bucket has rows, if all rows are candidates.
    """
    return buckets * job.cleaner.near_duplicates.bands_of_row


class _Texts:
    """The texts of candidates, each read when it is compared."""

    def __init__(self, job: Job, buckets: int):
        names = (f"{STAGE}/candidates-{bucket:06d}.texts" for bucket in range(buckets))
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


def _are_in(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns which keys are among sorted values."""
    if not len(values):
        return np.zeros(keys.shape, bool)
    places = np.searchsorted(values, keys)
    return values[np.minimum(places, len(values) - 1)] == keys
