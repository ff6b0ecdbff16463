"""Reads the weights of a checkpoint slice by slice, the counterpart of `streamed`.

Memory is bounded by the largest slice, or by what is kept of small arrays.
"""

from __future__ import annotations

import math
import pathlib
import threading
from typing import Any

import numpy as np
import tensorstore

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files.paths import is_bucket
from lingvo_gshard.core.files.stores import key_value_store
from lingvo_gshard.training.run.checkpoint.arrays import MODULUS, digest_of_part
from lingvo_gshard.training.run.checkpoint.run_item import Checkpoint

# Arrays up to this size are read at once if a slice shares its pieces on disk with others.
_AT_ONCE_BYTES = 2**27
# The number of such arrays that are kept for their next slice.
_KEPT = 2


class WeightReader:
    """The arrays of one item of a checkpoint. Each slice of an array is read once.

    Several threads may read.
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
        term = digest_of_part(part, index, stored.shape)
        with self._lock:
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
            if total % MODULUS != self._digests[path]:
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
