"""Writes a checkpoint whose weights arrive one after the other and are never all in memory.

The files are those of a `CheckpointStore`. A weight that is larger than its parts is written part
by part.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from lingvo_gshard.training.checkpoint import run_item
from lingvo_gshard.training.checkpoint.digests import MODULUS, digest_of_part
from lingvo_gshard.training.checkpoint.orbax_errors import quiet_orbax
from lingvo_gshard.training.checkpoint.run_item import RunRecord, WriteExtras

# The largest piece of an array on disk, in bytes, so that a process can read its shard alone.
# Writing one takes memory for several.
_CHUNK_BYTES = 2**25


@dataclasses.dataclass
class StreamedArray:
    """An array that is read when it is written.

    Attributes:
      shape: its shape.
      dtype: its type.
      parts: returns (index, part) for parts that fill the array. An index has as many numbers as
        dimensions that the part lacks.
      digest: the digest, once the array was written.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Callable[[], Iterator[tuple[tuple[int, ...], np.ndarray]]]
    digest: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.size * self.dtype.itemsize

    def chunks(self, part: tuple[int, ...]) -> list[int]:
        """Returns the shape of the chunks on disk. No chunk has elements of two parts.

        Args:
          part: shape of a part.
        """
        shape = [1] * (len(self.shape) - len(part)) + list(part)
        for axis, size in enumerate(shape):
            while int(np.prod(shape)) * self.dtype.itemsize > _CHUNK_BYTES and shape[axis] > 1:
                shape[axis] = next(n for n in range(shape[axis] // 2, 0, -1) if size % n == 0)
        return shape


class _Handler(ocp.type_handlers.NumpyHandler):
    """Writes streamed arrays in Orbax's format, one at a time."""

    def __init__(self):
        # Orbax would copy all arrays before it writes the first.
        super().__init__(deepcopy_host_arrays=False)
        self._turn = asyncio.Lock()

    async def _open_and_write(
        self, value: StreamedArray, tspec: dict[str, Any], ts_context: tensorstore.Context
    ) -> None:
        async with self._turn:
            stored, total = None, 0
            for index, part in value.parts():
                if stored is None:
                    tspec["metadata"]["chunks"] = value.chunks(part.shape)
                    spec = tensorstore.Spec(tspec)
                    stored = await tensorstore.open(spec, create=True, context=ts_context)
                rows = value.chunks(part.shape)[len(index)]
                for start in range(0, len(part), rows):
                    block = np.ascontiguousarray(part[start : start + rows], value.dtype)
                    total += digest_of_part(block, index, value.shape, start)
                    place = (*index, slice(start, start + len(block)))
                    await stored[place].write(block, can_reference_source_data_indefinitely=True)
            value.digest = total % MODULUS


def write_checkpoint(
    directory: pathlib.Path,
    step: int,
    theta: Mapping[str, StreamedArray],
    params_text: str,
    write_extras: WriteExtras | None = None,
) -> None:
    """Writes a checkpoint of weights only, complete or not at all.

    A run that goes on from it begins with new optimizer moments and the first batch.

    Args:
      directory: the checkpoints of the run; created if it is new.
      step: the step of the checkpoint.
      theta: path -> weight.
      params_text: the run's Params as text.
      write_extras: writes files into an empty directory of the checkpoint.

    Raises:
      OSError: the disk is full, or cannot be written.
    """
    quiet_orbax()
    unfinished = directory / f"{step}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        (unfinished / run_item.ITEM).mkdir(parents=True)
        _write_arrays(unfinished / "theta", theta)
        digests = {"theta": {path: array.digest for path, array in theta.items()}}
        record = RunRecord(step, None, run_item.versions(), digests)
        run_item.write_run(unfinished / run_item.ITEM, record, params_text, write_extras)
        os.replace(unfinished, directory / str(step))
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_arrays(directory: pathlib.Path, arrays: Mapping[str, StreamedArray]) -> None:
    registry = ocp.type_handlers.create_type_handler_registry((StreamedArray, _Handler()))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    checkpointer = ocp.Checkpointer(handler)
    try:
        checkpointer.save(directory, args=ocp.args.PyTreeSave(dict(arrays)))
    finally:
        checkpointer.close()
