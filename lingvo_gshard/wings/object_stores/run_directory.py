"""Log directories in buckets: their local copies, and BucketLock, which one process can hold.

Each write of the lock's file is conditional: it succeeds only if the file has not changed since the
process read it. So two processes never take the lock together. The holder rewrites the file every
ten seconds. A lock is stale if its process has ended, or if the process cannot be seen from
here and the file did not change for a minute.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable

import msgspec

from lingvo_gshard.training import RUN_DIRECTORIES, RUN_LOCKS, LockedError
from lingvo_gshard.wings.object_stores.buckets import CompareAndSwapFile, Generation
from lingvo_gshard.wings.object_stores.connections import SCHEMES
from lingvo_gshard.wings.object_stores.synced_folder import SyncedFolder
from lingvo_gshard.wings.services import run_lock

_LOOK_SECONDS = 1.0
_RELEASE_SECONDS = 10.0


class _Content(msgspec.Struct, frozen=True):
    """The content of the file. `count` refreshes make each one different."""

    holder: run_lock.Holder
    count: int


_DECODER = msgspec.json.Decoder(_Content)


class BucketLock:
    """Holds a lock in a bucket from construction to `release`."""

    def __init__(self, path: pathlib.Path, say: Callable[[str], None]):
        """Takes the lock; takes it over if it is stale, and says so.

        Raises:
          LockedError: another process holds it; the message names the process.
          OSError: the bucket is in trouble.
        """
        self._path, self._lock_file = path, CompareAndSwapFile(path)
        self._holder, self._count = run_lock.this_process(), 0
        self._is_lost = False
        self._released = threading.Event()
        self._writing = threading.Lock()
        self._generation = self._take(say)
        threading.Thread(target=self._keep, name="run lock", daemon=True).start()

    def check(self) -> None:
        """Raises LostLockError if another process took the lock over."""
        if self._is_lost:
            raise run_lock.LostLockError(
                f"{self._path} was taken over by another process: for "
                f"{run_lock.STALE_SECONDS:.0f} s, this process was not seen to live"
            )

    def release(self) -> None:
        """Deletes the file, unless another process took it over."""
        if self._released.is_set():
            return
        self._released.set()
        # A bucket that does not answer must not keep the process from ending.
        thread = threading.Thread(target=self._delete, name="run lock's end", daemon=True)
        thread.start()
        thread.join(_RELEASE_SECONDS)

    def _delete(self) -> None:
        with self._writing, contextlib.suppress(OSError):
            if not self._is_lost:
                self._lock_file.delete(self._generation)

    def _take(self, say: Callable[[str], None]) -> Generation:
        while True:
            content, generation = self._lock_file.read()
            found = _decode(content)
            if content is not None:
                if not self._is_stale(content, generation, found, say):
                    continue
                say(f"The lock {self._path} of {_words(found)} was stale and is taken over")
            if written := self._write(generation):
                return written

    def _is_stale(
        self,
        content: bytes,
        generation: Generation,
        found: _Content | None,
        say: Callable[[str], None],
    ) -> bool:
        """Returns whether a lock is stale.

        If this process cannot see whether the holder lives, it waits until the lock changes or
        STALE_SECONDS have passed. Returns False if the lock was deleted, or if another process
        holds it by then.
        """
        lives = run_lock.is_running(found.holder) if found else None
        deadline = time.monotonic() + run_lock.STALE_SECONDS
        if lives is None:
            say(
                f"{self._path} is held by {_words(found)}; waiting at most "
                f"{run_lock.STALE_SECONDS:.0f} s for a sign of its life"
            )
        while lives is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            now, generation_now = self._lock_file.read()
            if generation_now == generation or now == content:
                continue
            current = _decode(now)
            if not found or not current or current.holder.token != found.holder.token:
                return False
            lives = True
        if lives:
            raise LockedError(f"is in use by {_words(found)}")
        return True

    def _write(self, expected: Generation) -> Generation | None:
        """Writes the next content. Returns its generation; None if another process came first."""
        self._count += 1
        content = msgspec.json.encode(_Content(self._holder, self._count))
        if written := self._lock_file.write(content, expected):
            return written
        # An answer may have been lost, and the write repeated.
        found, generation = self._lock_file.read()
        return generation if found == content else None

    def _keep(self) -> None:
        while not self._is_lost and not self._released.wait(run_lock.REFRESH_SECONDS):
            # A bucket that does not answer for a while is no reason to stop training.
            with contextlib.suppress(OSError):
                self._refresh()

    def _refresh(self) -> None:
        with self._writing:
            if self._released.is_set():
                return
            written = self._write(self._generation)
            if written is None:
                content, generation = self._lock_file.read()
                found = _decode(content)
                is_own = bool(found) and found.holder.token == self._holder.token
                self._is_lost = content is not None and not is_own
                if not self._is_lost:
                    # Somebody deleted it by hand, or an earlier answer was lost. A bucket that is
                    # gone looks the same and takes no content; the next time tells.
                    written = self._write(generation)
            if written is not None:
                self._generation = written


def _decode(content: bytes | None) -> _Content | None:
    """Returns the content of a lock; None if there is none or it is damaged."""
    try:
        return _DECODER.decode(content or b"")
    except msgspec.DecodeError:
        return None


def _words(found: _Content | None) -> str:
    return str(found.holder) if found else "an unknown process"


for _scheme in SCHEMES:
    RUN_LOCKS.register(_scheme)(BucketLock)
    RUN_DIRECTORIES.register(_scheme)(SyncedFolder)
