"""Digests of arrays that do not depend on their sharding or on the number of processes.

An array is read as unsigned words w_i in C order. An element of up to 4 bytes is one word; a longer
one is split into words of 4 bytes. The digest is the sum of w_i (2 i + 1) mod 2^64. Each shard
contributes a term that depends only on its words and its offset. A change of a single word always
changes the digest, because 2 i + 1 is odd and has an inverse mod 2^64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core.lazy import jax

MODULUS = 2**64
_BLOCK = 2**16  # Words summed at once, few enough to stay in a core's cache.


def digest(array: np.ndarray | jax.Array, counts: bool = True) -> int:
    """Returns this process's term of an array's digest. The terms add up to it, mod 2^64.

    Args:
      array: the array. Of a jax.Array the process counts the shards that are first replicas.
      counts: whether the process counts a NumPy array, of which every process may have a copy.
    """
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        return _part(array, (0,) * array.ndim, array.shape) if counts else 0
    total = 0
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            offset = tuple(part.start or 0 for part in shard.index)
            total += _part(np.asarray(shard.data), offset, array.shape)
    return total % MODULUS


def digest_of_part(
    part: np.ndarray, index: tuple[int, ...], shape: tuple[int, ...], start: int = 0
) -> int:
    """Returns the term of a part of an array. Those of all parts add up to its digest, mod 2^64.

    Args:
      part: elements of the array with these first indices.
      index: the indices.
      shape: shape of the array.
      start: the first of the part along the dimension after the indices.
    """
    offset = (*index, start, *(0,) * (part.ndim - 1)) if part.ndim else index
    return _part(part.reshape((1,) * len(index) + part.shape), offset, shape) % MODULUS


def _part(shard: np.ndarray, offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns the term of a shard at `offset` in an array of `shape`."""
    if not shard.size:
        return 0
    words, offset, shape = _words(shard), (*offset, 0), (*shape, _words_per_element(shard))
    row_axis = _first_of_row(words.shape, shape)
    starts = _starts(words.shape[:row_axis], offset, shape)
    rows = words.reshape(starts.size, -1)
    within = sum(at * _stride(shape, axis) for axis, at in enumerate(offset) if axis >= row_axis)
    return sum(_sums(rows, starts + np.uint64(within % MODULUS))) % MODULUS


def _words_per_element(array: np.ndarray) -> int:
    return max(array.dtype.itemsize // 4, 1)


def _words(array: np.ndarray) -> np.ndarray:
    """Returns the array as unsigned words, with a last dimension over an element's words."""
    width = min(array.dtype.itemsize, 4)
    flat = np.ascontiguousarray(array).reshape(-1).view(f"<u{width}")
    return flat.reshape(*array.shape, _words_per_element(array))


def _first_of_row(part: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns the first dimension of the largest contiguous rows of a part."""
    axis = len(shape) - 1
    while axis > 0 and part[axis] == shape[axis]:
        axis -= 1
    return axis


def _stride(shape: tuple[int, ...], axis: int) -> int:
    return math.prod(shape[axis + 1 :])


def _starts(
    leading: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """Returns the index in the whole array of each row's first word: uint64 [rows]."""
    starts = np.zeros((1,), np.uint64)
    for axis, size in enumerate(leading):
        places = (np.arange(size, dtype=np.uint64) + np.uint64(offset[axis])) * np.uint64(
            _stride(shape, axis)
        )
        starts = (starts[:, None] + places).reshape(-1)
    return starts


def _sums(rows: np.ndarray, starts: np.ndarray) -> Iterator[int]:
    """Yields the sums of w_i (2 i + 1) of the blocks of a shard."""
    width = rows.shape[1]
    columns = min(width, _BLOCK)
    height = max(_BLOCK // columns, 1)
    for column in range(0, width, columns):
        doubled = 2 * np.arange(column, min(column + columns, width), dtype=np.uint64) + np.uint64(
            1
        )
        for row in range(0, len(rows), height):
            block = rows[row : row + height, column : column + columns].astype(np.uint64)
            of_row = block.sum(axis=1)
            yield int((block * doubled).sum())
            yield int((of_row * (2 * starts[row : row + height])).sum())
