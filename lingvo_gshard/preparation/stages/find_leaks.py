"""Finds rows held out for dev and test whose texts also occur in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.data.cleaning.leaks import SeenInTrain, Wanted
from lingvo_gshard.preparation.job import Job, Progress
from lingvo_gshard.preparation.stages.bucket_tasks import BucketTask, Done
from lingvo_gshard.preparation.stages.tally import Example, Tally
from lingvo_gshard.preparation.stages.unique_rows import Group, KeptRow, read_group

STAGE = "3-leaks"


@dataclasses.dataclass(frozen=True)
class CollectWanted:
    """Collects the hashes of rows held out, from all buckets.

    Attributes:
      buckets: the groups that are held out, by bucket.
    """

    buckets: tuple[tuple[Group, ...], ...]
    name: str = f"{STAGE}/wanted"

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for groups in self.buckets for group in groups)

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes the hashes."""
        parts, done = [], 0
        for bucket, groups in enumerate(self.buckets):
            rows = [group.to_row(row) for group in groups for row in read_group(job, bucket, group)]
            parts.append(Wanted.of(rows))
            done += len(rows)
            progress(len(rows), done / max(1, self.rows))
        with job.work.writing(f"{self.name}.npy") as file:
            np.save(file, Wanted.merged(parts).hashes)
        return Done()


@dataclasses.dataclass(frozen=True)
class LookThrough(BucketTask):
    """Looks through the training rows of a bucket."""

    @property
    def name(self) -> str:
        """The task's name in the work directory."""
        return f"{STAGE}/{self.bucket:06d}"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes which of the hashes the bucket has."""
        seen = SeenInTrain(Wanted(_wanted(job)))
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
    name: str = f"{STAGE}/seen"

    def run(self, job: Job, progress: Progress) -> Done:
        """Writes which of the hashes any bucket has."""
        seen = np.zeros(len(_wanted(job)), bool)
        for bucket in range(self.buckets):
            seen |= _load_bits(job, f"{STAGE}/{bucket:06d}", len(seen))
        _save_bits(job, self.name, seen)
        return Done()


class Leaks:
    """The leaks that were found."""

    def __init__(self, job: Job):
        """Loads what `MergeSeen` has written."""
        wanted = _wanted(job)
        self._seen = SeenInTrain(Wanted(wanted), _load_bits(job, f"{STAGE}/seen", len(wanted)))

    def without(
        self, group: Group, rows: Sequence[KeptRow], paths: Sequence[str], tally: Tally
    ) -> list[KeptRow]:
        """Returns the rows of a group held out that do not leak, and counts the others.

        Args:
          group: the group.
          rows: its rows.
          paths: the raw file of each part, for examples.
          tally: counts the rows left out.
        """
        reasons = self._seen.reasons(list(map(group.to_row, rows)))
        kept = []
        for row, reason in zip(rows, reasons, strict=True):
            if not reason:
                kept.append(row)
                continue
            example = Example.of_row(row.part, paths[row.part], row.line, row.target)
            tally.leave_out(reason, group.language, example)
        return kept


def can_leak(group: Group) -> bool:
    """Returns whether a group was held out by a hash; a test set that was given stays as it is."""
    return group.is_divided and group.split != "train"


def _wanted(job: Job) -> np.ndarray:
    # Mapped into memory, so that all workers share it.
    return np.load(job.work.file(f"{STAGE}/wanted.npy"), mmap_mode="r")


def _save_bits(job: Job, name: str, bits: np.ndarray) -> None:
    with job.work.writing(f"{name}.bits") as file:
        file.write(np.packbits(bits).tobytes())


def _load_bits(job: Job, name: str, count: int) -> np.ndarray:
    content = job.work.file(f"{name}.bits").read_bytes()
    return np.unpackbits(np.frombuffer(content, np.uint8), count=count).astype(bool)
