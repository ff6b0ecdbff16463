"""Opens local files that somebody else may have put there, and waits for no writer.

Opening a named pipe waits for its other end, and a device may never end. Code that reads a
directory which others can write to therefore accepts regular files only.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(OSError):
    """A path leads to something that is no regular file. `strerror` says what it is."""


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """Opens a regular file without waiting and returns its descriptor.

    Args:
      path: of the file. Links are followed.
      flags: as `os.open` takes them.
      mode: permissions of a file that is created.

    Raises:
      NotRegularError: something else is there.
      OSError: it cannot be opened.
    """
    text = os.fspath(path)
    try:
        descriptor = os.open(text, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        # A socket, a pipe without a reader that is opened to write, a directory that is.
        if error.errno not in (errno.ENXIO, errno.EISDIR):
            raise
        raise _refusal(os.stat(text).st_mode, text) from None
    found = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(found):
        os.close(descriptor)
        raise _refusal(found, text)
    os.set_blocking(descriptor, True)
    return descriptor


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file to read its bytes. Raises OSError as `open_descriptor` does."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Returns the content of a regular file.

    Args:
      path: of the file.
      limit: the most bytes that it may have.

    Raises:
      OSError: as `open_descriptor` does, and for a longer file.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit:,} bytes", os.fspath(path))
    return content


def _refusal(mode: int, path: str) -> NotRegularError:
    found = _KINDS.get(stat.S_IFMT(mode), "something else")
    return NotRegularError(errno.EINVAL, f"it is {found}, and a regular file is expected", path)
