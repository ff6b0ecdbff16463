"""Writes a checkpoint whose weights are read while it is written and are never all in memory.

The files have the format of `CheckpointStore`. A weight in several parts is written part by part.
Threads read, rearrange and write several parts at a time, within a memory budget. A part that is
larger than the budget is written alone.

`WeightReader` reads a checkpoint slice by slice. Its memory is bounded by the largest slice, or by
the small arrays that it keeps whole.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from lingvo_gshard.core import UserError, is_bucket, objects
from lingvo_gshard.training import Checkpoint, RunRecord, arrays, marker, quiet_orbax, run_item
from lingvo_gshard.wings.object_stores import buckets, scratch
from lingvo_gshard.wings.object_stores.checkpoints import checkpointer
from lingvo_gshard.wings.object_stores.connections import key_value_store
from lingvo_gshard.wings.open_models.transposing import contiguous

# The largest piece of an array on disk, in bytes, so that a process can read its shard alone.
# Writing one takes memory for several.
_CHUNK_BYTES = 2**25
# Threads that prepare and write parts. Each waits for the disk half of the time.
_THREADS = 4
# Parts that are read at the same time have at most this size together. A larger part is read alone.
_BYTES_AT_ONCE = 2**27


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an array.

    Attributes:
      index: the part's place in the array: one index for each leading dimension that the part does
        not have.
      shape: the part's shape.
      nbytes: the memory that reading the part takes.
      read: reads and returns the part.
    """

    index: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], np.ndarray]


@dataclasses.dataclass
class StreamedArray:
    """An array that is read when it is written.

    Attributes:
      dtype: its type.
      parts: parts of one shape that fill the array.
      digest: the digest, once the array was written.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Sequence[Part]
    digest: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def chunks(self) -> list[int]:
        """The shape of the chunks on disk. No chunk has elements of two parts."""
        part = self.parts[0].shape
        shape = [1] * (len(self.shape) - len(part)) + list(part)
        for axis, size in enumerate(shape):
            while int(np.prod(shape)) * self.dtype.itemsize > _CHUNK_BYTES and shape[axis] > 1:
                shape[axis] = next(n for n in range(shape[axis] // 2, 0, -1) if size % n == 0)
        return shape


class _Memory:
    """The memory that is set aside for parts."""

    def __init__(self, nbytes: int):
        self._most, self._used = nbytes, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Waits until a part of this size fits, and takes its memory until the context ends."""
        nbytes = min(nbytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._used + nbytes <= self._most)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


class _Handler(ocp.type_handlers.NumpyHandler):
    """Writes streamed arrays in Orbax's format."""

    def __init__(self):
        # Orbax would copy all arrays before it writes the first.
        super().__init__(deepcopy_host_arrays=False)
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self._memory = _Memory(_BYTES_AT_ONCE)

    async def _open_and_write(
        self, value: StreamedArray, tspec: dict[str, Any], ts_context: tensorstore.Context
    ) -> None:
        tspec["metadata"]["chunks"] = value.chunks
        spec = tensorstore.Spec(tspec)
        stored = await tensorstore.open(spec, create=True, context=ts_context)
        loop = asyncio.get_running_loop()
        jobs = [
            loop.run_in_executor(self._threads, self._write_part, stored, value, part)
            for part in value.parts
        ]
        value.digest = sum(await asyncio.gather(*jobs)) % arrays.MODULUS

    def _write_part(self, stored: tensorstore.TensorStore, value: StreamedArray, part: Part) -> int:
        """Writes a part chunk by chunk. Returns its term of the array's digest."""
        total, writes = 0, []
        with self._memory.taken(part.nbytes):
            array = part.read()
            rows = value.chunks[len(part.index)] if array.ndim else 1
            for start in range(0, len(array) if array.ndim else 1, rows):
                block = array[start : start + rows] if array.ndim else array
                block = contiguous(block, value.dtype)
                place = (*part.index, slice(start, start + len(block))) if array.ndim else ()
                # The next block is prepared while this one is written.
                for write in writes[-1:]:
                    write.result()
                writes = [stored[place].write(block, can_reference_source_data_indefinitely=True)]
                total += arrays.digest_of_part(block, part.index, value.shape, start)
            for write in writes:
                write.result()
        return total


def write_checkpoint(
    directory: pathlib.Path,
    theta: Mapping[str, StreamedArray],
    params_text: str,
    write_extras: run_item.WriteExtras,
) -> None:
    """Writes a checkpoint of step 0 with weights only, complete or not at all.

    A run that goes on from it begins with new optimizer moments and the first batch.

    Args:
      directory: the checkpoints of the run; created if it is new.
      theta: path -> weight.
      params_text: the run's Params as text.
      write_extras: writes files into an empty directory of the checkpoint.

    Raises:
      OSError: the disk is full, or cannot be written.
    """
    quiet_orbax()
    on_disk = not is_bucket(directory)
    # A bucket cannot rename: there, the marker that is written last makes a checkpoint complete.
    unfinished = directory / ("0.unfinished" if on_disk else "0")
    objects.remove_tree(unfinished)
    try:
        if on_disk:
            (unfinished / run_item.ITEM).mkdir(parents=True)
        _write_arrays(unfinished / "theta", theta)
        digests = {"theta": {path: array.digest for path, array in theta.items()}}
        record = RunRecord(0, None, run_item.versions(), digests)
        if on_disk:
            run_item.write_run(unfinished / run_item.ITEM, record, params_text, write_extras)
            os.replace(unfinished, directory / "0")
        else:
            local = scratch.new_folder("run-item")
            run_item.write_run(local, record, params_text, write_extras)
            buckets.upload_folder(local, unfinished / run_item.ITEM)
            objects.write_bytes(marker(directory, 0), b"")
    except BaseException:
        objects.remove_tree(unfinished)
        raise


def _write_arrays(directory: pathlib.Path, values: Mapping[str, StreamedArray]) -> None:
    registry = ocp.type_handlers.create_type_handler_registry((StreamedArray, _Handler()))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    writer = checkpointer(handler, directory)
    try:
        writer.save(directory, args=ocp.args.PyTreeSave(dict(values)))
    finally:
        writer.close()


# Arrays up to this size are read at once if a slice shares its pieces on disk with others.
_AT_ONCE_BYTES = 2**27
# The number of such arrays that are kept for their next slice.
_KEPT = 2


class WeightReader:
    """The arrays of one item of a checkpoint. Several threads may read.

    The digest of an array is checked when all of its slices were read. A slice that is read again
    is not counted.
    """

    def __init__(self, directory: pathlib.Path, checkpoint: Checkpoint, item: str):
        """Opens an item.

        Args:
          directory: the checkpoint.
          checkpoint: its record, as `read_run` returns it.
          item: name of the item, such as "theta".
        """
        self._directory = directory / item
        self._digests = checkpoint.record.digests[item]
        self._open_arrays: dict[str, tensorstore.TensorStore] = {}
        self._whole: dict[str, np.ndarray] = {}
        # Path -> sum of the digests' terms, and number of elements, of the slices that were read.
        self._sums: dict[str, tuple[int, int]] = {}
        self._counted: set[tuple[str, tuple[int, ...]]] = set()
        self._lock = threading.Lock()

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """Returns the slice of an array with these first indices; () returns all of it.

        Raises:
          UserError: the checkpoint lacks the array, or this was its last slice and it has other
            contents than were saved.
        """
        with self._lock:
            stored = self._stored(path)
        part = self._read(path, stored, index)
        term = arrays.digest_of_part(part, index, stored.shape)
        with self._lock:
            if (path, index) not in self._counted:
                self._counted.add((path, index))
                self._add(path, stored, part.size, term)
        return part

    def _add(self, path: str, stored: tensorstore.TensorStore, size: int, term: int) -> None:
        """Counts a slice. Raises ValueError if it was the last and the digest is another one."""
        total, elements = self._sums.get(path, (0, 0))
        total, elements = total + term, elements + size
        self._sums[path] = total, elements
        if elements == math.prod(stored.shape):
            del self._open_arrays[path]
            self._whole.pop(path, None)
            if total % arrays.MODULUS != self._digests[path]:
                raise UserError(
                    f"{self._directory}: {path} has other contents than were saved; the checkpoint "
                    "is damaged"
                )

    def _read(
        self, path: str, stored: tensorstore.TensorStore, index: tuple[int, ...]
    ) -> np.ndarray:
        nbytes = math.prod(stored.shape) * stored.dtype.numpy_dtype.itemsize
        chunk = stored.chunk_layout.read_chunk.shape or stored.shape
        if nbytes > _AT_ONCE_BYTES or all(size == 1 for size in chunk[: len(index)]):
            return stored[index].read().result()
        with self._lock:
            if path not in self._whole:
                while len(self._whole) >= _KEPT:
                    del self._whole[next(iter(self._whole))]
                self._whole[path] = stored.read().result()
            return self._whole[path][index]

    def _stored(self, path: str) -> tensorstore.TensorStore:
        if path not in self._digests:
            raise UserError(f"{self._directory} has no {path}; the checkpoint is of another model")
        if path not in self._open_arrays:
            base: str | dict[str, Any]
            if is_bucket(self._directory):
                base = key_value_store(f"{self._directory}/")
            else:
                base = self._directory.absolute().as_uri() + "/"
            store = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
            spec = {"driver": "zarr", "kvstore": store}
            self._open_arrays[path] = tensorstore.open(spec, read=True).result()
        return self._open_arrays[path]
