"""The digest of a batch, by which a replayed step knows that it got the same one."""

from __future__ import annotations

import zlib

import numpy as np

from lingvo_gshard.data.batching.packing import PackedBatch
from lingvo_gshard.data.input import Batch


def batch_digest(batch: Batch) -> int:
    """Returns a CRC-32 of names, shapes, types and values of a batch's arrays.

    If each process has only its own rows of a batch, the batch has a digest of its own, which is
    the same in all processes.
    """
    if isinstance(batch, PackedBatch) and batch.digest is not None:
        return batch.digest
    digest = 0
    for name, value in sorted(batch.items()):
        array = np.ascontiguousarray(value)
        digest = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), digest)
        digest = zlib.crc32(array.reshape(-1).view(np.uint8), digest)
    return digest
