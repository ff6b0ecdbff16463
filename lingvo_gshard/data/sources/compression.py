"""Reads the lines of a file, or of a part of it, in bounded memory, however long a line is."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, cast

import zstandard

_BLOCK = 1 << 17


def bounded_lines(file: IO[bytes], count: int | None, longest: int) -> Iterator[bytes | None]:
    """Yields the lines of a file from its position, without line ends; None for a long one.

    Args:
      file: the file, open for reading.
      count: number of bytes to read. The last byte must end a line. None reads to the file's end.
      longest: largest number of bytes of a line. At most one block of a longer line is in memory.
    """
    rest, is_long = b"", False
    # `read` would lose what comes before the place where a compressed file is damaged.
    while block := cast(io.BufferedIOBase, file).read1(
        _LINES_AT_ONCE if count is None else min(_LINES_AT_ONCE, count)
    ):
        if count is not None:
            count -= len(block)
        lines: list[bytes | None] = [*block.split(b"\n")]
        if is_long and len(lines) == 1:
            continue
        if is_long:
            # The end of a line whose beginning was too long.
            lines[0], is_long = None, False
        else:
            lines[0] = (rest or b"") + (lines[0] or b"")
        rest = lines.pop()
        yield from _without_long(lines, longest)
        if rest is None or len(rest) > longest:
            rest, is_long = b"", True
    if is_long:
        yield None
    elif rest:
        yield rest


def _without_long(lines: list[bytes | None], longest: int) -> list[bytes | None]:
    if max((len(line) for line in lines if line is not None), default=0) <= longest:
        return lines
    return [line if line is not None and len(line) <= longest else None for line in lines]


SUFFIXES = (".bz2", ".gz", ".xz", ".zst")


# Errors that reading a damaged or truncated file raises.
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)


# Compressed bytes of zstd that are decompressed at once. Four bytes may stand for 128 KiB, so that
# the content is at most 32 MiB.
_STEP = 1 << 10


def decompressed(path: str, file: BinaryIO) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Returns the content of an open file as a context manager; the file itself if it is plain.

    Args:
      path: its path, whose end says how it is compressed.
      file: the file as it is stored.
    """
    if path.endswith(".gz"):
        plain: Any = gzip.open(file, "rb")
        return plain
    if path.endswith(".bz2"):
        return bz2.open(file, "rb")
    if path.endswith(".xz"):
        return lzma.open(file, "rb")
    if path.endswith(".zst"):
        return io.BufferedReader(_Zstandard(file), _BLOCK)
    return contextlib.nullcontext(file)


def without_suffix(path: str) -> str:
    """Returns a path without the end that says how the file is compressed."""
    for suffix in SUFFIXES:
        path = path.removesuffix(suffix)
    return path


class _Zstandard(io.RawIOBase):
    """The content of a .zst file. The library's own stream takes a truncated file for a whole one.

    Raises:
      EOFError: the file ends within a frame.
      OSError: the file is damaged.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._frame = None
        self._compressed = self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._content:
            if not self._compressed:
                self._compressed = memoryview(self._file.read(_BLOCK))
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the compressed file ends before its end-of-stream marker")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        step, rest = self._compressed[:_STEP], self._compressed[_STEP:]
        try:
            self._content = memoryview(self._frame.decompress(step))
        except zstandard.ZstdError as error:
            raise OSError(f"damaged zstd data: {error}") from None
        if self._frame.eof:
            rest = memoryview(self._frame.unused_data + bytes(rest))
            self._frame = None
        self._compressed = rest


_LINES_AT_ONCE = 1 << 20
