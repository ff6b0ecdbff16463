"""Opens local files that somebody else may have put there: regular files only, without waiting.

Opening a named pipe waits for its other end, and a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

# Files that are read whole and have more bytes are refused. Larger ones are read block by block.
MOST_BYTES = 2**31
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class IrregularFileError(OSError):
    """A path is no regular file, or the file is too large. `strerror` says so in words."""

    def __init__(self, path: str | os.PathLike[str], words: str):
        super().__init__(errno.EINVAL, words, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a regular file without waiting and returns its descriptor. Links are followed.

    Raises:
      OSError: it cannot be opened; IsADirectoryError for a directory, IrregularFileError for what
        else is no regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    except OSError as error:
        # A socket, or a pipe without a reader that is opened to write.
        if error.errno == errno.ENXIO:
            _check(path, os.stat(path), None)
        raise
    try:
        _check(path, os.fstat(descriptor), None)
    except OSError:
        os.close(descriptor)
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file to read its bytes. Raises OSError as `open_descriptor` does."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def open_to_append(path: str | os.PathLike[str]) -> int:
    """Opens a file, which need not be there, to append to it; see `open_descriptor`."""
    return open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def read_regular(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Returns the content of a regular file.

    Raises:
      OSError: as `open_descriptor` does, and IrregularFileError for a larger file.
    """
    with open_regular(path) as file:
        _check(path, os.fstat(file.fileno()), most)
        content = file.read(most + 1)
    if len(content) > most:
        raise _too_large(path, len(content), most)
    return content


def require_regular(path: str | os.PathLike[str], most: int | None = None) -> int:
    """Returns the size of a file that a library may open: opening neither blocks nor is endless.

    Args:
      most: the most bytes that it may have; None for any number.

    Raises:
      OSError: there is no regular file at the path, or the file is larger.
    """
    found = os.stat(path)
    _check(path, found, most)
    return found.st_size


def require_regular_tree(path: str | os.PathLike[str]) -> None:
    """Checks that what is below a folder is regular files, for libraries that open them.

    Raises:
      OSError: there is a file that is not regular.
    """
    for parent, _, names in os.walk(path):
        for name in names:
            require_regular(os.path.join(parent, name))


def _check(path: str | os.PathLike[str], found: os.stat_result, most: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        raise IrregularFileError(path, f"this is {kind}; a regular file was expected")
    if most is not None and found.st_size > most:
        raise _too_large(path, found.st_size, most)


def _too_large(path: str | os.PathLike[str], size: int, most: int) -> IrregularFileError:
    words = f"the file has {size:,} bytes; at most {most:,} were expected"
    return IrregularFileError(path, words)
