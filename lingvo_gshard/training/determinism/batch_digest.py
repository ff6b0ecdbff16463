"""The digest of a batch, by which a replayed step knows that it got the same one."""

from __future__ import annotations

import zlib

import numpy as np

from lingvo_gshard.data.batching.packing import PackedBatch
from lingvo_gshard.data.input import Batch


def batch_digest(batch: Batch) -> int:
    """Returns a CRC-32 of names, shapes, types and values of a batch's arrays.

    A batch of which each process has its own rows alone brings a digest that all have.
    """
    if isinstance(batch, PackedBatch) and batch.digest is not None:
        return batch.digest
    digest = 0
    for name, value in sorted(batch.items()):
        array = np.ascontiguousarray(value)
        digest = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), digest)
        digest = zlib.crc32(array.reshape(-1).view(np.uint8), digest)
    return digest
