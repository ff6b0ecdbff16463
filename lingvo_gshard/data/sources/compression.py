"""Reads compressed files in bounded memory."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from typing import IO, Any, BinaryIO

import zstandard

_BLOCK = 1 << 17


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
