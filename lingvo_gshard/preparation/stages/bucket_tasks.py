"""The common part of tasks over the rows of one bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.preparation.job import Job, Progress
from lingvo_gshard.preparation.stages.unique_rows import Group, KeptRow, read_group

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
      bucket: number of the bucket.
      groups: the groups of the bucket that the task works on.
    """

    bucket: int
    groups: tuple[Group, ...]

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
                progress(len(part), done / total)
