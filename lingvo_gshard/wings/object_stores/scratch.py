"""Local folders for copies of what is in buckets.

What a process keeps locally lies in one folder of the temporary directory ($TMPDIR) that is removed
when the process ends. The folder of a process that was killed is removed by the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile

_PREFIX = f"gshard-copies-{os.getuid()}-"
_LOCK = ".in-use"


class _Scratch:
    """The folder of this process; made when it is first needed."""

    place: pathlib.Path | None = None
    owner = 0
    lock: int | None = None
    count = 0


def new_folder(name: str) -> pathlib.Path:
    """Returns a new local folder whose name ends so; it is removed when the process ends."""
    place = _scratch()
    _Scratch.count += 1
    folder = place / f"{_Scratch.count}-{name}"
    folder.mkdir()
    return folder


def _scratch() -> pathlib.Path:
    """Returns this process's folder."""
    # A forked process has a folder of its own: both would remove it.
    if _Scratch.place is None or _Scratch.owner != os.getpid():
        _remove_abandoned()
        _Scratch.place = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
        _Scratch.owner = os.getpid()
        _Scratch.lock = os.open(_Scratch.place / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(_Scratch.lock, fcntl.LOCK_EX)
        atexit.register(_remove_own, os.getpid())
    return _Scratch.place


def _remove_own(owner: int) -> None:
    if _Scratch.place is not None and os.getpid() == owner:
        shutil.rmtree(_Scratch.place, ignore_errors=True)


def _remove_abandoned() -> None:
    """Removes the folders of processes that ended without removing them: no lock holds them."""
    for folder in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
