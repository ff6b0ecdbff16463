"""Job: what every worker of a preparation knows."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any, Protocol

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.paths import is_bucket
from lingvo_gshard.data.cleaning.base import BaseCleaner
from lingvo_gshard.data.prepared.manifest import TEXT
from lingvo_gshard.preparation.inputs.part_readers import PartOptions
from lingvo_gshard.preparation.inputs.source import Source
from lingvo_gshard.preparation.work_directory import WorkDirectory


class Progress(Protocol):
    """Is told by a task how far it is."""

    def __call__(self, rows: int, share: float) -> None:
        """Tells how many rows are done since the last call.

        Args:
          rows: number of rows.
          share: share of the task's work that is done by now, 0 to 1.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Job:
    """The job that every worker of a preparation knows.

    Attributes:
      params: Params of the `Preparation`.
      sources: the sources.
      output: directory of prepared data, local or in a bucket.
      work: directory of unfinished work.
      reading: how parts are read.
    """

    params: Params
    sources: tuple[Source, ...]
    output: str
    work: WorkDirectory
    reading: PartOptions

    @property
    def local_output(self) -> str:
        """Directory on a disk that files of the output are written to first."""
        return os.fspath(self.work.file("output")) if is_bucket(self.output) else self.output

    def deliver(self, *names: str) -> None:
        """Copies complete files of the output to its bucket, if it is in one."""
        if is_bucket(self.output):
            for name in names:
                objects.upload(f"{self.local_output}/{name}", f"{self.output}/{name}")

    @property
    def is_text(self) -> bool:
        """Whether rows are text without translations."""
        return self.sources[0].content == TEXT

    @functools.cached_property
    def cleaner(self) -> BaseCleaner:
        """Cleans the rows of all sources."""
        p = self.params
        return (p.documents if self.is_text else p.cleaning).instantiate()

    @functools.cached_property
    def digest_key(self) -> bytes:
        """Key of the digests of rows, which the seed chooses."""
        return f"lingvo_gshard rows {self.params.seed}".encode()


class Task(Protocol):
    """A piece of work that any worker can do.

    Attributes:
      name: the task's name in the work directory.
      rows: expected number of rows, or of other units; the share of the stage's work.
    """

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> int: ...

    def run(self, job: Job, progress: Progress) -> Any:
        """Does the work and returns its record."""
        ...
