"""Local copies of files in buckets, for code that needs a file on a disk, and room for them.

What a process keeps locally lies in one folder of the temporary directory ($TMPDIR) that is removed
when the process ends. The folder of a process that was killed is removed by the next one.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile

from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.paths import GivenPath, is_bucket

_PREFIX = f"gshard-copies-{os.getuid()}-"
_LOCK = ".in-use"
# Requests at a time. Each waits for the network most of its time.
_REQUESTS = 16


class _Scratch:
    """The folder of this process; made when it is first needed."""

    place: pathlib.Path | None = None
    owner = 0
    lock: int | None = None
    count = 0


def new_folder(name: str) -> pathlib.Path:
    """Returns a new local folder that is removed when the process ends.

    Args:
      name: ends the name of the folder, for people who look at the disk.
    """
    place = _scratch()
    _Scratch.count += 1
    folder = place / f"{_Scratch.count}-{name}"
    folder.mkdir()
    return folder


def local_file(path: GivenPath) -> pathlib.Path:
    """Returns a file as it is on a local disk: itself, or a copy of a bucket's file.

    Raises:
      OSError: it cannot be read, or the disk is full.
    """
    if not is_bucket(path):
        return pathlib.Path(path)
    name = os.fspath(path).rpartition("/")[2]
    target = new_folder("file") / name
    objects.download(path, target)
    return target


def local_folder(path: GivenPath) -> pathlib.Path:
    """Returns a folder as it is on a local disk: itself, or a copy of a bucket's folder.

    Raises:
      OSError: it cannot be read, or the disk is full.
    """
    if not is_bucket(path):
        return pathlib.Path(path)
    target = new_folder(os.fspath(path).rstrip("/").rpartition("/")[2])
    download_all(path, target, list(objects.find(path)))
    return target


def download_all(path: GivenPath, target: pathlib.Path, names: list[str]) -> None:
    """Copies files below a folder of a bucket to a local folder, several at a time.

    Args:
      path: the folder in the bucket.
      target: the local folder.
      names: the files, as paths below the folder.
    """
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
    _several(lambda name: objects.download(f"{os.fspath(path)}/{name}", target / name), names)


def upload_folder(source: pathlib.Path, path: GivenPath) -> None:
    """Copies all files below a local folder to a folder of a bucket, several at a time.

    Args:
      source: the local folder.
      path: the folder in the bucket.
    """
    names = list(objects.find(source))
    _several(lambda name: objects.upload(source / name, f"{os.fspath(path)}/{name}"), names)


def _several(function, names: list[str]) -> None:
    """Calls a function with each name; raises the first error after all calls have ended."""
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
        for _ in pool.map(function, names):
            pass


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
