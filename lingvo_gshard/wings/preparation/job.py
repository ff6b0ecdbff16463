"""Job: what every worker of a preparation knows."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

import msgspec
import numpy as np

from lingvo_gshard.core import (
    Params,
    Progress,
    UserError,
    atomic,
    is_bucket,
    objects,
    params_text,
    stores,
)
from lingvo_gshard.wings.preparation.cleaning.cleaner import BaseCleaner
from lingvo_gshard.wings.preparation.prepared.manifest import TEXT
from lingvo_gshard.wings.preparation.sources import Source

_SETTINGS = "settings.json"
_PARTIAL = ".partial-"
_Record = TypeVar("_Record")


class WorkDirectory:
    """The directory of unfinished work.

    A task writes its files, and then its record. A file or a record with its name is complete, so a
    task whose record is there is done. A process may be killed at any time.
    """

    def __init__(self, path: str | os.PathLike):
        """Names the directory, which need not exist."""
        self.root = pathlib.Path(path)

    def file(self, name: str) -> pathlib.Path:
        """Returns the path of a task's file."""
        return self.root / name

    def record(self, task: str, kind: type[_Record]) -> _Record | None:
        """Returns the record of a task that is done, else None."""
        try:
            content = self._record_file(task).read_bytes()
        except FileNotFoundError:
            return None
        try:
            return atomic.decode(content, kind)
        except msgspec.DecodeError as error:
            raise UserError(
                f"{self._record_file(task)}: damaged: {error}. Remove {self.root}, so that the "
                "preparation starts anew"
            ) from None

    def finish(self, task: str, record: object) -> None:
        """Records that a task is done, once all of its files are written."""
        path = self._record_file(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_atomically(os.fspath(path), msgspec.json.encode(record))

    def forget(self, task: str) -> None:
        """Removes the record of a task, if there is one."""
        self._record_file(task).unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a file that gets its name when the block ends without an error."""
        path = self.file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A worker of a run that was killed may not have ended yet.
        partial = f"{path}{_PARTIAL}{os.getpid()}"
        try:
            with open(partial, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            pathlib.Path(partial).unlink(missing_ok=True)
            raise

    def save_array(self, name: str, array: np.ndarray) -> None:
        """Writes an array to the file of a task."""
        with self.writing(f"{name}.npy") as file:
            np.save(file, array)

    def shared_array(self, name: str) -> np.ndarray:
        """Returns an array of `save_array`, mapped into memory, so that all workers share it."""
        return np.load(self.file(f"{name}.npy"), mmap_mode="r")

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the directory; UserError if another process works in it.

        An error of a user before any rows are read removes it: corrected settings start at once.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / "lock", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"{self.root}: another process prepares data in this directory; wait for it, "
                    "or name another one by `output`"
                ) from None
            try:
                yield
            except UserError:
                if not any(self.root.glob("[1-9]-*/*.json")):
                    self.remove()
                raise

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Keeps the settings of new work, and refuses to go on with work of other settings.

        Raises:
          UserError: a setting differs; the message names it.
        """
        path = self.root / _SETTINGS
        if path.exists():
            check_same(
                settings, msgspec.json.decode(objects.read_bytes(path)), os.fspath(self.root)
            )
        else:
            atomic.write_atomically(os.fspath(path), msgspec.json.encode(settings))

    def remove_files(self, stage: str) -> None:
        """Removes the files of a stage, except for its records."""
        for path in (self.root / stage).glob("*"):
            if path.suffix != ".json":
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the directory with all that is in it."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _record_file(self, task: str) -> pathlib.Path:
        return self.root / f"{task}.json"


def check_same(settings: dict[str, Any], found: dict[str, Any], where: str) -> None:
    """Raises UserError if work or data in a directory has other settings; names one setting.

    Classes may have the names of earlier versions.
    """
    before = {
        name: params_text.class_today(value) if isinstance(value, str) else value
        for name, value in found.items()
    }
    for name in sorted(settings.keys() | before.keys()):
        if settings.get(name, "") != before.get(name, ""):
            raise UserError(
                f"{where} holds work of other settings: {name} was {before.get(name)!r}, and is "
                f"now {settings.get(name)!r}. Go on with the settings as they were, name another "
                "directory by `output`, or remove this one"
            )


@dataclasses.dataclass(frozen=True)
class Job:
    """The job that every worker of a preparation knows; `params` are Params of `Preparation`."""

    params: Params
    sources: tuple[Source, ...]
    output: str
    work: WorkDirectory
    on_bad_row: str

    @property
    def local_output(self) -> str:
        """Directory on a disk that files of the output are written to first."""
        return os.fspath(self.work.file("output")) if is_bucket(self.output) else self.output

    def deliver(self, *names: str) -> None:
        """Copies complete files of the output to its bucket, if it is in one."""
        if store := stores.store_of(self.output):
            for name in names:
                store.upload(f"{self.local_output}/{name}", f"{self.output}/{name}")

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


class Done(msgspec.Struct):
    """The record of a task whose results are in files."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A piece of work that any worker can do.

    Attributes:
      rows: expected number of rows, or of other units; the share of the stage's work.
      function: does the work. It takes this task, the job, a Progress and the arguments, and tells
        how many rows are done. It returns the record, if there is one.
    """

    name: str
    rows: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self, job: Job, progress: Progress) -> Any:
        """Does the work and returns the record."""
        record = self.function(self, job, progress, *self.arguments)
        return Done() if record is None else record
