"""Files of rows, ordered by digest, from which any range of digests can be read."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

import msgspec
import numpy as np

# Digests are divided by their first 12 bits. Ranges of them, not hash values modulo a number, make
# buckets: so buckets can be chosen after all rows are counted, and follow each other in the order
# of digests.
RANGES = 1 << 12
_BITS_LEFT = 4


class KeyedRow(NamedTuple):
    """A row with its digest.

    Attributes:
      digest: rows are equal if and only if their digests are.
      language: language of the row.
      source: the sentence, or "".
      target: its translation, or a text.
      split: "train", "dev" or "test".
      line: number of the row in its part, which orders equal rows.
    """

    digest: bytes
    language: str
    source: str
    target: str
    split: str
    line: int


def write_rows(file: IO[bytes], rows: Sequence[KeyedRow]) -> np.ndarray:
    """Writes rows in the order of their digests.

    Returns:
      The number of bytes of each range of digests.
    """
    ordered = sorted(rows)
    prefixes = np.frombuffer(b"".join([row.digest[:2] for row in ordered]), ">u2") >> _BITS_LEFT
    begins = np.searchsorted(prefixes, np.arange(RANGES + 1))
    encode = msgspec.msgpack.Encoder().encode
    blobs = [
        encode(ordered[begin:end]) if begin < end else b""
        for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    ]
    sizes = np.fromiter(map(len, blobs), np.int64, RANGES)
    file.write(sizes.astype("<u4").tobytes())
    file.writelines(blobs)
    return sizes


def read_rows(path: pathlib.Path, begin: int, end: int) -> Iterator[KeyedRow]:
    """Yields the rows of the ranges of digests from `begin` to `end`, which is excluded."""
    decode = msgspec.msgpack.Decoder(list[KeyedRow]).decode
    with open(path, "rb") as file:
        sizes = np.frombuffer(file.read(4 * RANGES), "<u4").astype(np.int64)
        file.seek(4 * RANGES + int(sizes[:begin].sum()))
        for size in sizes[begin:end].tolist():
            if size:
                yield from decode(file.read(size))
