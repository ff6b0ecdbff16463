"""Folders of snapshots in memory whose agents were killed for good.

An agent holds a lock on its folder, which the kernel releases when the agent ends, however it ends.
The folder of a killed agent is kept for the agent that is started in its place. If none comes, the
next agent on the machine finds the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import time
from collections.abc import Iterator

_PREFIX = "gshard-"
# Whatever starts agents again has done so long before.
_ABANDONED_SECONDS = 3600.0


def folder_of(parent: str, job: str, host: str) -> str:
    """Returns the folder of a host's snapshots.

    Args:
      parent: folder in memory that all jobs share.
      job: text that differs from job to job, of letters and digits.
    """
    return f"{parent}/{_PREFIX}{job}-{host}"


def hold(folder: pathlib.Path) -> int:
    """Locks a folder for this process. Returns what `os.close` releases.

    Raises:
      OSError: the folder belongs to another user, or to another agent that lives.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            # Who owns the folder could put another state there.
            raise PermissionError(errno.EPERM, f"{folder} belongs to another user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def tidy(own: pathlib.Path, is_new: bool) -> list[str]:
    """Removes abandoned folders beside one's own.

    Args:
      own: the folder of this agent, by `folder_of`.
      is_new: whether the job is new, so that snapshots of earlier jobs in its place are of no use.

    Returns:
      A line about each folder that was removed, or that may be needed and can be removed by hand.
    """
    lines = []
    of_job = own.name[: own.name.index("-", len(_PREFIX)) + 1]
    for folder, seconds in _abandoned(own):
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        found = f"{folder} has {size / 2**30:.2f} GiB of snapshots in memory, and its agent is gone"
        is_of_job = folder.name.startswith(of_job)
        if (is_of_job and is_new) or seconds > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
            lines.append(f"{found}: it is removed")
        elif not is_of_job:
            lines.append(f"{found}; if its job has ended: rm -r {folder}")
    return lines


def _abandoned(own: pathlib.Path) -> Iterator[tuple[pathlib.Path, float]]:
    """Yields this user's folders whose agents are gone, and the age of their newest file."""
    for folder in sorted(own.parent.glob(f"{_PREFIX}*")):
        if folder == own or not folder.is_dir():
            continue
        # Of a living agent, of another user, or removed meanwhile.
        with contextlib.suppress(OSError):
            lock = hold(folder)
            try:
                newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
                yield folder, time.time() - newest
            finally:
                os.close(lock)
