"""Copies of transposed arrays.

NumPy copies a transposed matrix along rows, and reads a column of the source for each. Of the many
cache lines that a column touches, none is still in the cache when the next row needs it. Copying
blocks, first contiguously and then transposed, is several times as fast.
"""

from __future__ import annotations

import numpy as np

# A block of this many rows and columns stays in a core's cache: 128 KiB of the largest words.
_BLOCK = 128
# Arrays with more matrices than this are copied by NumPy.
_MOST_MATRICES = 4096
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def contiguous(view: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """Returns an array in C order: the view if it has C order and the type, otherwise a copy.

    Args:
      view: an array with any strides.
      dtype: the type of the result; None keeps the type of the view.
    """
    dtype = np.dtype(dtype or view.dtype)
    if view.flags.c_contiguous:
        return view.astype(dtype, copy=False)
    if dtype.itemsize < view.dtype.itemsize:
        view = view.astype(dtype, order="K")
    result = np.empty(view.shape, view.dtype)
    copy(view, result)
    return result.astype(dtype, copy=False)


def copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copies an array into another of the same shape and any strides.

    Args:
      source: the array.
      target: written in place.
    """
    if source.dtype != target.dtype:
        source = source.astype(target.dtype, order="K")
    words = _WORDS.get(source.dtype.itemsize)
    if words is None or not source.ndim or not source.size:
        target[...] = source
        return
    source, target = _merged(source.view(words), target.view(words))
    fast, slow = _fastest(source), _fastest(target)
    others = [axis for axis in range(source.ndim) if axis not in (fast, slow)]
    matrices = [source.shape[axis] for axis in others]
    if fast == slow or np.prod(matrices, dtype=np.int64) > _MOST_MATRICES:
        target[...] = source
        return
    order = [*others, slow, fast]
    source, target = source.transpose(order), target.transpose(order)
    for index in np.ndindex(*matrices):
        _copy_matrix(source[index], target[index])


def _copy_matrix(source: np.ndarray, target: np.ndarray) -> None:
    """Copies a matrix whose rows are contiguous in the source and columns in the target."""
    rows, columns = source.shape
    for row in range(0, rows, _BLOCK):
        for column in range(0, columns, _BLOCK):
            part = slice(row, row + _BLOCK), slice(column, column + _BLOCK)
            target[part] = np.ascontiguousarray(source[part])


def _fastest(array: np.ndarray) -> int:
    """Returns the axis with the smallest stride."""
    return min(range(array.ndim), key=lambda axis: (array.strides[axis], array.shape[axis] == 1))


def _merged(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges dimensions that are adjacent in memory in both arrays. Returns both arrays."""
    keep = [axis for axis, size in enumerate(source.shape) if size > 1] or [0]
    shape = [source.shape[axis] for axis in keep]
    strides = [[array.strides[axis] for axis in keep] for array in (source, target)]
    axis = len(shape) - 2
    while axis >= 0:
        if all(s[axis] == s[axis + 1] * shape[axis + 1] for s in strides):
            shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
            for s in strides:
                del s[axis]
        axis -= 1
    return (
        np.lib.stride_tricks.as_strided(source, shape, strides[0]),
        np.lib.stride_tricks.as_strided(target, shape, strides[1]),
    )
