"""Pseudo-random permutations: the order of training rows, of batches and of samples.

No library draws an order, since a resumed run needs the same one under every version of every
library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Below, a table is faster, and uniform over all permutations.
_SMALLEST_NETWORK = 1 << 12
_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permutation(size: int, *key: int) -> np.ndarray:
    """Returns a pseudo-random permutation of range(size) that depends only on `key`.

    It sorts splitmix64 hashes (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195).
    """
    with np.errstate(over="ignore"):
        hashes = splitmix64(np.arange(size, dtype=np.uint64) * _GOLDEN + _state(key))
    return np.argsort(hashes, kind="stable")


def permuted(places: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Returns the elements at some places of a pseudo-random permutation of range(size).

    The permutation depends on size and key, and is never held in memory: a Feistel network (Luby
    and Rackoff 1988, https://doi.org/10.1137/0217022) permutes the next larger power of four, and
    is applied again to results beyond the range (cycle walking; Black and Rogaway 2002,
    https://doi.org/10.1007/3-540-45760-7_9).

    Args:
      places: int64, each in range(size).
    """
    if size < _SMALLEST_NETWORK:
        return permutation(size, *key)[places]
    half = np.uint64(((size - 1).bit_length() + 1) // 2)
    with np.errstate(over="ignore"):
        state = _state(key)
        keys = [splitmix64(state + np.uint64(i) * _GOLDEN) for i in range(_ROUNDS)]
        result = _feistel(places.astype(np.uint64), half, keys)
        outside = np.flatnonzero(result >= size)
        while len(outside):
            result[outside] = _feistel(result[outside], half, keys)
            outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, half: np.uint64, keys: list[np.uint64]) -> np.ndarray:
    """Returns values of 2 * half bits, each replaced by another one."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right + key) & mask)
    return left << half | right


def _state(key: tuple[int, ...]) -> np.uint64:
    state = np.uint64(0)
    for part in key:
        state = splitmix64(state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return state


def splitmix64(x: Any) -> Any:
    """Returns numbers or arrays of uint64 with their bits mixed. The caller ignores overflows."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
