"""Indexed data sets of Megatron: token ids in NAME.bin, and where documents begin in NAME.idx.

IndexedDatasetBuilder writes the format
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py). The
index has a header, then the length (int32) and the first byte (int64) of each sequence, then the
number of the first sequence of each document, and of the sequence after the last (int64).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core import UserError, objects

_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
# Codes of the types of ids. Others stand for floats.
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def pair(path: str) -> tuple[str, str]:
    """Returns the file of ids and the index of a data set. One of the two is given."""
    stem = os.path.splitext(path)[0]
    return f"{stem}.bin", f"{stem}.idx"


class IndexedIds:
    """The documents of a data set, mapped from its files."""

    def __init__(self, ids: str, index: str):
        """Reads the header of the index; OSError or UserError if that cannot be done."""
        self._index, size = index, os.path.getsize(index)
        with objects.open_to_read(index) as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(_MAGIC):
                raise _damage(index, 0, f"{_MAGIC!r} and a header of 34 bytes were expected")
            found = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        _, version, code, sequences, ends = _HEADER.unpack(header)
        if version != _VERSION:
            raise _damage(index, 9, f"version {version}; {_VERSION} was expected")
        if code not in _TYPES:
            raise _damage(index, 17, f"ids of type {code}, not {', '.join(map(str, _TYPES))}")
        stated = _HEADER.size + 12 * sequences + 8 * ends
        if size == stated + sequences:
            raise _damage(index, stated, "modes of sequences, as of images, which are not read")
        if size != stated or not ends:
            raise _damage(index, size, f"the file ends; the header says after {stated:,} bytes")
        self.documents, self._sequences = ends - 1, sequences
        self._places = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences]).tolist()
        lengths, begins, firsts = np.split(found, self._places)[1:]
        self._lengths, self._begins = lengths.view("<i4"), begins.view("<i8")
        self._firsts = firsts.view("<i8")
        self._path, self._type = ids, np.dtype(_TYPES[code])

    def read(self, begin: int, end: int | None) -> Iterator[list[int]]:
        """Yields the ids of documents from `begin` to before `end`; None for the last one.

        Raises:
          OSError, UserError: a file cannot be read, or the index or the size of the ids is wrong.
        """
        firsts = self._firsts[begin : None if end is None else end + 1]
        known = np.maximum.accumulate(np.clip(firsts, 0, self._sequences))
        known[0] = known[0] if begin else 0
        known[-1] = known[-1] if end else self._sequences
        self._same(2, begin, firsts, known)
        first, last, width = int(firsts[0]), int(firsts[-1]), self._type.itemsize
        lengths = self._lengths[first:last].astype(np.int64)
        self._same(0, first, lengths, np.maximum(lengths, 0))
        start = int(self._begins[first - 1]) + width * int(self._lengths[first - 1]) if first else 0
        begins = np.cumsum([start, *(width * lengths)])
        self._same(1, first, self._begins[first : last + 1], begins)
        size = os.path.getsize(self._path)
        if size < begins[-1] or (end is None and size != begins[-1]):
            what = f"the file ends; {self._index} has {begins[-1]:,} bytes of ids"
            raise _damage(self._path, size, what)
        with objects.open_to_read(self._path) as file:
            file.seek(start)
            for count in np.diff(begins[firsts - first]).tolist():
                yield np.frombuffer(file.read(count), self._type).tolist()

    def _same(self, table: int, begin: int, found: np.ndarray, expected: np.ndarray) -> None:
        """Raises UserError at the first entry of a table of the index that is not as expected."""
        for at in np.flatnonzero(found != expected[: len(found)]).tolist():
            byte = self._places[table] + (8 if table else 4) * (begin + at)
            what = f"{found[at]:,} is there; {expected[at]:,} was expected"
            raise _damage(self._index, byte, what)


def _damage(path: str, byte: int, what: str) -> UserError:
    return UserError(f"{path}, byte {byte:,}: {what}")
