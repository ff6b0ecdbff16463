"""WorkDirectory: what a preparation has finished so far, on disk, so that it can go on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import IO, Any, TypeVar

import msgspec

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import atomic, json_text

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
            return json_text.decode(content, kind)
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

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the directory and keeps other processes from working in it.

        Raises:
          UserError: another process works in it.
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
            yield

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Keeps the settings of new work, and refuses to go on with work of other settings.

        Raises:
          UserError: a setting differs; the message names it.
        """
        path = self.root / _SETTINGS
        if path.exists():
            check_same(settings, msgspec.json.decode(path.read_bytes()), os.fspath(self.root))
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
    """Raises ValueError that names a setting in which work or data of a directory differs."""
    for name in sorted(settings.keys() | found.keys()):
        if settings.get(name) != found.get(name):
            raise UserError(
                f"{where} holds work of other settings: {name} was {found.get(name)!r}, and is now "
                f"{settings.get(name)!r}. Go on with the settings as they were, name another "
                "directory by `output`, or remove this one"
            )
