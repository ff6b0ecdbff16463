"""Turns the arrays of a checkpoint into the state of a trainer.

NumPy copies a transposed matrix along rows, and reads a column of the source for each. Of the many
cache lines that a column touches, none is still in the cache when the next row needs it. Copying
blocks, first contiguously and then transposed, is several times as fast.
"""

from __future__ import annotations

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.training.run.checkpoint.run_item import Checkpoint
from lingvo_gshard.training.step.state_part import part_titles
from lingvo_gshard.training.step.trainer import Trainer

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


def restored_state(
    trainer: Trainer, checkpoint: Checkpoint, abstract_state: NestedMap | None = None
) -> NestedMap:
    """Returns a checkpoint's arrays as a trainer's state.

    Parts of the state that are missing from the checkpoint get their initial values. The averages
    and the loss scale are missing if the run that saved did not use them. The moments are missing
    after local updates, since each worker has moments of its own.

    Args:
      trainer: the trainer whose state it becomes.
      checkpoint: the checkpoint, with the arrays of each part of the state.
      abstract_state: the state of a runtime, which may have more parts than the trainer's.

    Raises:
      UserError: names the arrays that do not fit the trainer's specs.
    """
    specs = NestedMap({**(abstract_state or {}), **trainer.state_specs()})
    restored = {
        part: unflatten(specs[part], arrays, part_titles().get(part, part))
        for part, arrays in checkpoint.arrays.items()
        if part in specs
    }
    state = trainer.initial_extras(restored["theta"])
    if "moments" not in restored:
        state.moments = specs.moments.transform(lambda spec: np.zeros(spec.shape, spec.dtype))
    state.update(restored, step=np.int32(checkpoint.step), stopped=np.bool_(False))
    return state


def restored_theta(trainer: Trainer, checkpoint: Checkpoint) -> NestedMap:
    """Returns the part of a checkpoint that `Runtime.load_theta` takes.

    Raises:
      UserError: names the arrays that do not fit the trainer's specs.
    """
    part = trainer.evaluated_part
    specs, arrays = trainer.state_specs()[part], checkpoint.arrays.get(part, {})
    return unflatten(specs, arrays, part_titles()[part])
