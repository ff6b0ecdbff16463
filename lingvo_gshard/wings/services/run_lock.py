"""RunLock: a file that one process at a time can hold.

On a disk, also of a network file system, the file is created exclusively and says which process
holds it. A thread refreshes its time of modification. A lock is stale if its process has ended, or
if the process cannot be seen from here and the file was not refreshed for a minute.

Only the holder of a second lock, `<name>.takeover`, may replace a stale lock. The holder first
reads the lock again, and replaces it only if its content has not changed. Two processes therefore
never take over together.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from lingvo_gshard.core import regular
from lingvo_gshard.training import RUN_LOCKS, LockedError, MovedError

# Environment variables that the agents of a cluster set: the job of this process, and its round.
JOB, ROUND = "GSHARD_JOB", "GSHARD_ROUND"

# Processes in these states have ended; only their parent has not noticed yet.
_ENDED_STATES = ("Z", "X", "x")


class Holder(msgspec.Struct, frozen=True):
    """The content of a lock file.

    Attributes:
      started: when the process took the lock, in words.
      ticks: when the process started, in clock ticks since the machine did; 0 if unknown. It tells
        the process from a later one with the same number.
      namespace: the machine since its last start, and the container, within which `pid` is unique;
        "" if unknown.
      token: random; differs between any two locks.
      job: the job whose agent started the process; "" if none did.
      round: the round of the job. All agents agree that a round is over before the next begins.
    """

    host: str
    pid: int
    started: str
    ticks: int
    namespace: str
    token: str
    job: str = ""
    round: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


def this_process() -> Holder:
    """Returns this process, with a new token."""
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        ticks=(state_and_ticks(os.getpid()) or ("", 0))[1],
        namespace=_namespace(),
        token=secrets.token_hex(8),
        job=os.environ.get(JOB, ""),
        round=int(os.environ.get(ROUND, 0)),
    )


def is_running(holder: Holder) -> bool | None:
    """Returns whether the process of a lock still runs; None if that cannot be seen from here.

    A process of an earlier round of this job counts as ended. The agent ends such a
    process, unless the host is lost.
    """
    if holder.job and holder.job == os.environ.get(JOB):
        if holder.round < int(os.environ.get(ROUND, 0)):
            return False
    if not holder.namespace or holder.namespace != _namespace():
        return None
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    found = state_and_ticks(holder.pid)
    if found is None:
        return True
    state, ticks = found
    return state not in _ENDED_STATES and holder.ticks in (0, ticks)


def _namespace() -> str:
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def state_and_ticks(pid: int) -> tuple[str, int] | None:
    """Returns a process's state and start, fields 3 and 22 of proc_pid_stat(5); None if hidden."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses and may contain anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


# A lock whose process cannot be seen is stale after this time without a refresh.
STALE_SECONDS = 60.0
REFRESH_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Holder)


class LostLockError(OSError):
    """Another process took the lock over, because this one was not seen to live."""


class _Found(msgspec.Struct):
    """The bytes of a lock file, which no two locks share, and its time by the file system."""

    content: bytes
    refreshed: float

    @property
    def holder(self) -> Holder | None:
        """The process that the file names; None if the file is damaged."""
        try:
            return _DECODER.decode(self.content)
        except msgspec.DecodeError:
            return None

    def __str__(self) -> str:
        return str(self.holder or "an unknown process")


@RUN_LOCKS.register("")
class RunLock:
    """Holds a lock file from construction to `release`."""

    def __init__(self, path: pathlib.Path, say: Callable[[str], None]):
        """Takes the lock; takes it over if it is stale.

        Raises:
          LockedError: another process holds it; the message names the process.
          OSError: the file cannot be written.
        """
        self._path = path
        self._directory = _identity(path.parent)
        self._content = _ENCODER.encode(this_process())
        self._is_lost = False
        self._released = threading.Event()
        _acquire(path, self._content, say)
        self._refreshed = time.monotonic()
        thread = threading.Thread(target=self._keep, name="run lock", daemon=True)
        thread.start()

    def check(self) -> None:
        """Checks that this process may go on writing to the directory.

        Raises:
          LostLockError: another process took the lock over.
          MovedError: the directory was moved or deleted.
        """
        if _identity(self._path.parent) != self._directory:
            raise MovedError(f"{self._path.parent} was moved or deleted while this run wrote to it")
        if self._is_lost:
            raise LostLockError(
                f"{self._path} was taken over by {_read(self._path) or 'another process'}: for "
                f"{STALE_SECONDS:.0f} s, this process was not seen to live"
            )

    def release(self) -> None:
        """Removes the lock file, unless another process may have taken it over."""
        if self._released.is_set():
            return
        self._released.set()
        # Without recent refreshes another process may be taking over right now.
        if not self._is_lost and time.monotonic() - self._refreshed < STALE_SECONDS / 2:
            with contextlib.suppress(OSError):
                if regular.read_regular(self._path) == self._content:
                    self._path.unlink()

    def _keep(self) -> None:
        while not self._is_lost and not self._released.wait(REFRESH_SECONDS):
            # A file system that does not answer for a while is no reason to stop training.
            with contextlib.suppress(OSError):
                self._refresh()

    def _refresh(self) -> None:
        try:
            descriptor = regular.open_descriptor(self._path, os.O_RDWR)
        except FileNotFoundError:
            # Somebody deleted it by hand.
            self._is_lost = not _create(self._path, self._content)
            return
        try:
            if os.read(descriptor, 4096) != self._content:
                self._is_lost = True
                return
            os.utime(descriptor)
        finally:
            os.close(descriptor)
        self._refreshed = time.monotonic()


def _identity(directory: pathlib.Path) -> tuple[int, int] | None:
    """Returns numbers that differ between any two directories; None if there is none."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _acquire(path: pathlib.Path, content: bytes, say: Callable[[str], None]) -> None:
    """Creates a lock file, or replaces one that is stale."""
    while not _create(path, content):
        found = _read(path)
        if found is None or not _is_stale(path, found, say):
            continue
        takeover = path.with_name(path.name + ".takeover")
        _acquire(takeover, content, say)
        try:
            current = _read(path)
            if current is not None and current.content == found.content:
                _replace(path, content)
                say(f"The lock {path} of {found} was stale and is taken over")
                return
        finally:
            takeover.unlink()


def _is_stale(path: pathlib.Path, found: _Found, say: Callable[[str], None]) -> bool:
    """Returns whether a lock is stale; False if it is not there any more or another one is.

    Waits if the process cannot be seen from here, until it refreshes the lock or is late.
    """
    lives = is_running(found.holder) if found.holder else None
    is_waiting = False
    current: _Found | None = found
    while lives is None:
        age = _now(path) - found.refreshed
        if age > STALE_SECONDS:
            return True
        if not is_waiting:
            is_waiting = True
            wait = min(STALE_SECONDS - age, STALE_SECONDS)
            say(f"{path} is held by {found}; waiting at most {wait:.0f} s for a sign of its life")
        time.sleep(_LOOK_SECONDS)
        current = _read(path)
        if current is None or current.content != found.content:
            return False
        lives = True if current.refreshed != found.refreshed else None
    if lives:
        raise LockedError(f"is in use by {found}")
    return True


def _create(path: pathlib.Path, content: bytes) -> bool:
    """Creates a file with some content; returns False if it exists."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return True


def _replace(path: pathlib.Path, content: bytes) -> None:
    """Replaces a file by one with other content, at once."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    _create(new, content)
    os.replace(new, path)


def _read(path: pathlib.Path) -> _Found | None:
    try:
        # Opening a file makes a network file system show its current content and times.
        with regular.open_regular(path) as file:
            return _Found(file.read(4096), os.fstat(file.fileno()).st_mtime)
    except FileNotFoundError:
        if path.is_symlink():
            raise regular.IrregularFileError(path, "this link leads to no file") from None
        return None


def _now(path: pathlib.Path) -> float:
    """Returns the time by the clock that dates the files beside `path`."""
    clock = path.with_name(f"{path.name}.clock-{os.getpid()}-{threading.get_ident()}")
    with clock.open("wb") as file:
        clock.unlink()
        return os.fstat(file.fileno()).st_mtime
