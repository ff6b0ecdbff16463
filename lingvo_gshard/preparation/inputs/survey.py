"""Surveys a raw file: computes its digest, and finds where it can be cut into parts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import msgspec
import numpy as np

from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.paths import is_bucket
from lingvo_gshard.data.sources import compression

# A part is as many lines, so that its rows stay the same whatever the number of workers.
PART_LINES = 1 << 16
_BLOCK = 1 << 22

# The places that a file may be cut at: after any line, between paragraphs, or nowhere.
LINES, PARAGRAPHS, NOWHERE = "lines", "paragraphs", "nowhere"


class Cut(msgspec.Struct, frozen=True):
    """A place where a part begins.

    Attributes:
      offset: its first byte.
      line: number of its first line, from 1.
    """

    offset: int
    line: int


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Facts on a file before its rows are read.

    Attributes:
      path: the file.
      bytes: its size.
      modified: time of its last change, in nanoseconds; 0 for a file in a bucket.
      sha256: digest of its bytes, as stored.
      lines: number of its lines; -1 if they were not counted.
      cuts: where its parts begin, the first at the file's beginning.
    """

    path: str
    bytes: int
    modified: int
    sha256: str
    lines: int
    cuts: list[Cut]

    def has_changed(self) -> bool:
        """Returns whether the file is no longer the one that was surveyed."""
        size, modified = _state(self.path)
        if (size, modified) == (self.bytes, self.modified):
            return False
        return size != self.bytes or survey(self.path, NOWHERE).sha256 != self.sha256


def survey(path: str, cut: str, counts_lines: bool = False) -> Survey:
    """Reads a file once for its digest and its cuts. A compressed file is not cut.

    Args:
      path: the file.
      cut: where it may be cut: LINES, PARAGRAPHS or NOWHERE.
      counts_lines: whether to count the lines of a file that is compressed or not cut, too.

    Raises:
      OSError: the file cannot be read.
    """
    size, modified = _state(path)
    is_plain = path == compression.without_suffix(path)
    digest, cuts = hashlib.sha256(), _Cuts(cut if is_plain else NOWHERE)
    with objects.open_to_read(path) as file:
        for block in _blocks(file):
            digest.update(block)
            if is_plain:
                cuts.add(block)
    lines = cuts.lines if is_plain else -1
    if counts_lines and not is_plain:
        lines = _compressed_lines(path)
    return Survey(
        path=path,
        bytes=size,
        modified=modified,
        sha256=digest.hexdigest(),
        lines=lines,
        cuts=cuts.found,
    )


def _state(path: str) -> tuple[int, int]:
    """Returns the size of a file, -1 if it is gone, and the time of its last change."""
    if is_bucket(path):
        size = objects.size_of(path)
        return -1 if size is None else size, 0
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


class _Cuts:
    """Counts the lines of a file, given in blocks, and finds where it can be cut.

    Attributes:
      found: the cuts.
    """

    def __init__(self, kind: str):
        self._kind = kind
        self.found = [Cut(0, 1)]
        self._ended = self._position = 0
        self._ends_with_newline = True

    @property
    def lines(self) -> int:
        """Number of lines so far; the last one may lack its end."""
        return self._ended + (not self._ends_with_newline)

    def add(self, block: bytes) -> None:
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
        allowed = ends
        if self._kind == PARAGRAPHS:
            # Two line ends in a row are an empty line, which no paragraph has.
            previous = np.concatenate([[-1 if self._ends_with_newline else -2], ends[:-1]])
            allowed = ends[previous == ends - 1] if len(ends) else ends
        if self._kind != NOWHERE:
            self._cut(ends, allowed)
        self._ended += len(ends)
        self._position += len(block)
        self._ends_with_newline = block.endswith(b"\n")

    def _cut(self, ends: np.ndarray, allowed: np.ndarray) -> None:
        """Cuts after the first allowed line end that makes a part of PART_LINES or more."""
        while True:
            # Index, in this block, of the line end that completes the part.
            needed = self.found[-1].line + PART_LINES - 2 - self._ended
            if needed >= len(ends):
                return
            after = np.searchsorted(allowed, ends[max(needed, 0)])
            if after == len(allowed):
                return
            end = int(allowed[after])
            line = self._ended + int(np.searchsorted(ends, end)) + 2
            self.found.append(Cut(self._position + end + 1, line))


def _compressed_lines(path: str) -> int:
    """Returns the number of lines of a compressed file; -1 if it is damaged."""
    count, last = 0, b"\n"
    try:
        with objects.open_to_read(path) as stored, compression.decompressed(path, stored) as file:
            for block in _blocks(file):
                count += block.count(b"\n")
                last = block[-1:]
    except compression.READ_ERRORS:
        return -1
    return count + (last != b"\n")


def _blocks(file) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block
