"""The log directory of a run: its paths, and the check that it belongs to the run.

A log directory in a store, such as a bucket, has a local folder for all files but the checkpoints.
The run that claims the directory appends to the files there, and they are copied to the store from
time to time and before each checkpoint is complete.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from lingvo_gshard.core import Seam, processes
from lingvo_gshard.core.config import params_text
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.config.params_text import experiment_from_text
from lingvo_gshard.core.errors import UserError, explained
from lingvo_gshard.core.files import objects, stores
from lingvo_gshard.core.files.atomic import replace_file
from lingvo_gshard.core.files.stores import BucketError
from lingvo_gshard.core.signals import called_before_abrupt_end
from lingvo_gshard.training.run.checkpoint.arrays import PARAMS_COPY
from lingvo_gshard.training.run.checkpoint.orbax_storage import steps_in

Say = Callable[[str], None]

_PARAMS, _LOCK = "params.txt", "run.lock"
# Folder where the agents of a cluster meet, unless they meet elsewhere.
AGENTS = "agents"


class LockedError(UserError):
    """Another process holds the lock."""


class MovedError(OSError):
    """The directory of the lock was moved or deleted."""


class Lock(Protocol):
    """A lock that this process holds from construction to `release`.

    `check` raises OSError if another process took it over, and MovedError.
    """

    def check(self) -> None: ...

    def release(self) -> None: ...


class SyncedFolder(Protocol):
    """The local copy of a folder in a store.

    `pull` copies what is new in the store, and `push` what changed locally. Between `start` and
    `stop`, a thread copies what changes. All raise OSError if the store is in trouble.
    """

    folder: pathlib.Path

    def pull(self) -> None: ...

    def push(self) -> None: ...

    def start(self, say: Say) -> None: ...

    def stop(self, say: Say) -> None: ...


# Scheme of a store, "" for disks -> takes the lock at a path there, or raises LockedError. Without
# such a feature, directories are not locked.
RUN_LOCKS: Seam[Callable[[pathlib.Path, Say], Lock]] = Seam("run_locks")
# Scheme of a store -> returns an empty local copy of a folder there. The second argument tells, by
# name, which files and folders at the top stay in the store alone.
RUN_DIRECTORIES: Seam[Callable[[pathlib.Path, Callable[[str], bool]], SyncedFolder]] = Seam(
    "run_directories"
)


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


class Logdir:
    """The directory of one run, on a disk or in a bucket.

    Attributes:
      place: where the directory is, absolute; for a bucket its URL.
      checkpoints: the directory of the checkpoints, in `place`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.place = stores.absolute(path)
        self.checkpoints = self.place / "checkpoints"
        self._scheme = stores.scheme_of(path) if stores.is_bucket(path) else ""
        # Imported first: a store's feature registers its locks as well.
        self._remote = RUN_DIRECTORIES[self._scheme] if self._scheme else None
        self._lock: Lock | None = None

    @property
    def path(self) -> pathlib.Path:
        """The local directory of all files but the checkpoints: `place`, or its local copy.

        A copy is up to date with the bucket when this is read. The run that claims the directory
        changes the copy.

        Raises:
          UserError: the bucket is in trouble.
        """
        if not self._remote:
            return self.place
        if self._lock is None:
            with self._named():
                self._synced.pull()
        return self._synced.folder

    @property
    def params(self) -> pathlib.Path:
        """The file params.txt, with every hyperparameter, in `path`."""
        return self.path / _PARAMS

    @functools.cached_property
    def _synced(self) -> SyncedFolder:
        assert self._remote
        return self._remote(self.place, _stays_in_bucket)

    def exists(self) -> bool:
        """Returns whether the directory is there. Raises ValueError as `path` does."""
        with self._named():
            return objects.exists(self.place) if self._remote else self.place.is_dir()

    def has_params(self) -> bool:
        """Returns whether params.txt, with every hyperparameter, is there."""
        with self._named():
            return objects.is_file(self.place / _PARAMS)

    @property
    def number(self) -> str:
        """Text that differs between a local directory and one that was deleted before."""
        return "" if self._remote else str(self.place.stat().st_ino)

    def identity(self) -> str | None:
        """Returns text that differs between any two directories; None if the run is gone."""
        try:
            if store := stores.store_of(self.place):
                entry = store.children(self.place).get(_PARAMS)
                return entry.tag if entry else None
            parts = [self.place.stat(), (self.place / _PARAMS).stat()]
        except OSError:
            return None
        return f"{[(part.st_dev, part.st_ino) for part in parts]} {parts[1].st_mtime_ns}"

    def push(self) -> None:
        """Copies what this run has changed to the bucket, if the directory is in one.

        Raises:
          OSError: the bucket is in trouble.
        """
        if self._remote and self._lock is not None:
            self._synced.push()

    def has_checkpoints(self) -> bool:
        """Returns whether the directory has a complete checkpoint."""
        return self.last_step is not None

    @property
    def last_step(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return max(self._steps(), default=None)

    def read_params(self, say: Say = _warn) -> Params:
        """Returns the Params of the run, from params.txt or else from a checkpoint's copy.

        Args:
          say: shows a line to the user if params.txt is missing or damaged.

        Raises:
          UserError: the directory holds no run, or its Params are damaged.
        """
        try:
            return _params_in(self.place / _PARAMS)
        except ValueError as error:
            problem = error
        for step in reversed(self._steps()):
            copy = self.checkpoints / str(step) / PARAMS_COPY
            with contextlib.suppress(ValueError):
                params = _params_in(copy)
                say(f"Warning: {problem}; using the copy in the checkpoint of step {step:,}")
                return params
        raise problem

    def params_as_text(self) -> dict[str, str]:
        """Returns path -> value of params.txt, as text; nothing if it is missing or damaged."""
        try:
            text = objects.read_bytes(self.place / _PARAMS).decode("utf-8")
        except (OSError, UnicodeDecodeError):
            return {}
        pairs = (line.partition(" : ") for line in text.splitlines())
        return {path: value for path, colon, value in pairs if colon}

    @contextlib.contextmanager
    def claim(self, params: Params, say: Say = _warn) -> Iterator[None]:
        """Creates the directory and locks it for this run until the context ends.

        The main process takes the lock for all processes of the run. A run without checkpoints
        writes params.txt here. A run that resumes writes params.txt when it goes on
        (`write_params`).

        Raises:
          UserError: the directory cannot be written, another run uses the directory, the processes
            see different directories, or the directory belongs to another run (`check`). All
            processes raise the error.
        """
        with explained(f"`logdir={self.place}` cannot be written", OSError):
            is_file = objects.is_file(self.place)
        if is_file:
            raise UserError(f"`logdir={self.place}` is a file; a directory was expected")
        problem = self._take_lock(say) if processes.is_main() else None
        with self._releasing(say):
            self._refuse(processes.from_main(problem) or self._not_shared())
            self.check(params, say)
            if not self.has_checkpoints():
                self.write_params(params)
            yield

    @contextlib.contextmanager
    def locked(self, say: Say = _warn) -> Iterator[None]:
        """Locks the directory until the context ends, for work on it that is no training.

        Raises:
          UserError: the directory cannot be written, or a run uses it.
        """
        problem = self._take_lock(say)
        with self._releasing(say):
            self._refuse(problem)
            yield

    @contextlib.contextmanager
    def _releasing(self, say: Say) -> Iterator[None]:
        """Copies what has changed to a bucket and gives up the lock when the context ends."""
        try:
            with called_before_abrupt_end(self.release):
                yield
        finally:
            if self._remote and self._lock is not None:
                self._synced.stop(say)
            self.release()

    def _refuse(self, problem: str | None) -> None:
        """Raises UserError if there is a problem with the directory."""
        if problem:
            raise UserError(f"`logdir={self.place}` {problem}")

    def release(self) -> None:
        """Gives up the lock, if this process has it."""
        if self._lock is not None:
            self._lock.release()

    def check_lock(self) -> None:
        """Checks, for all processes, that the directory is still there and this run's.

        Raises:
          OSError: another run took it over, or it was moved or deleted.
        """
        processes.together(self.check_lock_here)

    def check_lock_here(self) -> None:
        """Checks the same in the process that holds the lock, and nothing in the others."""
        if self._lock is not None:
            self._lock.check()

    def check(self, params: Params, say: Say = _warn) -> None:
        """Checks that Params give the results of the run that is saved here.

        Raises:
          UserError: Params that determine results differ. The message names their paths.
        """
        if not self.has_checkpoints():
            return
        saved = self.read_params(say)
        different = [row for row in saved.diff(params) if _changes_results(row[0], params, saved)]
        if different:
            shown = [f"  {path}: {old} there, {new} here" for path, old, new in different[:10]]
            if len(different) > 10:
                shown.append(f"  and {len(different) - 10} more")
            raise UserError(
                f"`logdir={self.place}` holds a run of {saved.name or 'another experiment'} with "
                "other Params. Choose another directory, or the same Params:\n" + "\n".join(shown)
            )

    def write_params(self, params: Params) -> None:
        """Writes params.txt, in the main process.

        Raises:
          UserError: in all processes, if it cannot be written.
        """
        problem = self._write(params.to_text()) if processes.is_main() else None
        self._refuse(processes.from_main(problem))

    def _steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, ascending."""
        with self._named():
            return steps_in(self.checkpoints)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Names `logdir` in errors of a bucket."""
        with explained(f"`logdir={self.place}` cannot be read", BucketError):
            yield

    def _take_lock(self, say: Say) -> str | None:
        """Locks the directory for this process. Returns the problem if that is impossible."""
        try:
            objects.make_folder(self.place)
            if self._scheme in RUN_LOCKS:
                self._lock = RUN_LOCKS[self._scheme](self.place / _LOCK, say)
            if self._remote:
                self._synced.pull()
                self._synced.start(say)
        except LockedError as error:
            return f"{error}. Stop that run first, or choose another directory"
        except OSError as error:
            return f"cannot be written: {error.strerror}"
        return None

    def _write(self, text: str) -> str | None:
        """Writes params.txt. Returns the problem if that is impossible."""
        try:
            replace_file(self.params, text.encode())
            self.push()
        except OSError as error:
            return f"cannot be written: {error.strerror}"
        return None

    def _not_shared(self) -> str | None:
        """Returns the problem if a process does not see the main process's directory."""
        if processes.count() == 1:
            return None
        token = self.place / f".shared-{processes.from_main(secrets.token_hex(8))}"
        if processes.is_main():
            objects.write_bytes(token, b"")
        blind = [k for k, sees in enumerate(processes.gather(_appears(token))) if not sees]
        if processes.is_main():
            with contextlib.suppress(OSError):
                objects.remove(token)
        if not blind:
            return None
        return (
            f"of process {blind[0]} is another directory than that of process 0. All processes "
            "must share one"
        )


def _stays_in_bucket(name: str) -> bool:
    """Returns whether a file or folder of a log directory has no local copy."""
    # Each launch writes curves for TensorBoard to a file of its own.
    return name in ("checkpoints", "events", AGENTS) or name.startswith(
        (_LOCK, "damaged-", ".shared-")
    )


def _params_in(path: pathlib.Path) -> Params:
    """Returns the Params in a file; ValueError if it is missing, damaged or cut off."""
    try:
        text = objects.read_bytes(path).decode("utf-8")
        params = experiment_from_text(text)
    except FileNotFoundError:
        raise UserError(f"{path.parent} holds no run: it has no {path.name}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    today, _, _ = params.to_text().splitlines()[-1].partition(" : ")
    last = params_text.last_path(text) or today
    if not text.endswith("\n") or f"\n{last} : " not in text:
        raise UserError(f"{path} is cut off: it does not end with {last}")
    return params


def _appears(path: pathlib.Path, seconds: float = 20.0) -> bool:
    """Waits for a file, which a network file system may show late. Returns whether it exists."""
    deadline = time.monotonic() + seconds
    while not objects.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _changes_results(path: str, *trees: Params) -> bool:
    """Returns whether a run computes something else with another value at a path of Params.

    A class of one tree may lack options of the other's.
    """
    return all(tree.changes_results(path) for tree in trees)
