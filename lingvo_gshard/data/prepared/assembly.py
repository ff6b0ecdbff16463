"""Assembly: from planned batches to arrays, reading the records of this process's rows alone."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.data.batching import packing
from lingvo_gshard.data.batching.packing import Batch, PackedBatch, Tokens
from lingvo_gshard.data.prepared.planning.pieces import Bucket, Pieces
from lingvo_gshard.data.prepared.planning.plan import PlannedBatch
from lingvo_gshard.data.prepared.table import Table

# Returns which rows of a batch of a bucket this process needs, bool [B]; None for all.
OwnRows = Callable[[int], "np.ndarray | None"]


class PreparedBatch(PackedBatch):
    """A batch in which other processes' rows have no tokens, only segments and positions.

    Attributes:
      digest: a CRC-32 of which piece of which row is where, the same in all processes.
    """

    def __init__(self, arrays: PackedBatch, read_all: Callable[[], Batch], digest: int):
        """Takes over the arrays.

        Args:
          arrays: the batch as this process knows it.
          read_all: returns it with the tokens of all rows.
          digest: the digest.
        """
        super().__init__(arrays)
        self.examples, self.digest, self._read_all = arrays.examples, digest, read_all

    def whole(self) -> Batch:
        """Returns the batch with the tokens of all rows."""
        return self._read_all()


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of some rows.

    Attributes:
      rows: numbers of the rows, ascending.
      sources: the sources.
      targets: the targets.
    """

    rows: np.ndarray
    sources: Tokens
    targets: Tokens


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Makes batches.

    Attributes:
      table: the rows.
      buckets: rows, source length and target length of the batches of each bucket.
      before: the id before the first token of each target.
      has_sources: whether batches have a source.
      identity: a digest of data and settings.
    """

    table: Table
    buckets: Sequence[Bucket]
    before: int
    has_sources: bool
    identity: str = ""

    def read(self, batches: Sequence[PlannedBatch], own_rows: OwnRows | None = None) -> Records:
        """Reads the records of batches.

        Args:
          batches: the batches.
          own_rows: which rows to read; None for all.

        Raises:
          UserError: a shard cannot be read.
        """
        needed = [np.zeros(0, np.int64)]
        for batch in batches:
            own = own_rows(batch.bucket) if own_rows else None
            rows = batch.pieces.rows
            needed.append(rows if own is None else rows[own[batch.rows]])
        rows = np.unique(np.concatenate(needed))
        return Records(rows, *self.table.read(rows))

    def batch(self, planned: PlannedBatch, records: Records) -> PreparedBatch:
        """Returns a batch. Rows without records have no tokens, and damaged ones are left out."""
        place = _places(records.rows, planned.pieces.rows)
        sizes = records.sources.lengths + records.targets.lengths
        kept = (place < 0) | (sizes[place] > 0) if len(sizes) else place < 0
        pieces, rows, place = planned.pieces[kept], planned.rows[kept], place[kept]
        shape = self.buckets[planned.bucket]
        if self.has_sources:
            arrays = self._pairs(pieces, rows, place, records, shape)
        else:
            arrays = self._texts(pieces, rows, place, records, shape)
        return PreparedBatch(
            PackedBatch.of(arrays, rows, pieces.rows),
            lambda: self.batch(planned, self.read([planned])),
            self._digest(planned),
        )

    def _pairs(
        self, pieces: Pieces, rows: np.ndarray, place: np.ndarray, records: Records, shape: Bucket
    ) -> Batch:
        sources = _gather(records.sources, place, pieces.begins, pieces.lengths[:, 0])
        targets = _gather(records.targets, place, pieces.begins, pieces.lengths[:, 1])
        return packing.pack(rows, np.arange(len(rows)), sources, targets, shape, self.before)

    def _texts(
        self, pieces: Pieces, rows: np.ndarray, place: np.ndarray, records: Records, shape: Bucket
    ) -> Batch:
        lengths = pieces.lengths[:, 1]
        labels = _gather(records.targets, place, pieces.begins, lengths)
        earlier = np.maximum(0, pieces.begins - 1)
        previous = _gather(records.targets, place, earlier, np.ones_like(lengths)).ids
        before = np.where(pieces.begins > 0, previous, self.before)
        return packing.packed_targets(rows, lengths, labels.ids, before, shape[0], shape[2])

    def _digest(self, planned: PlannedBatch) -> int:
        digest = zlib.crc32(f"{self.identity} {planned.bucket}".encode())
        for part in (planned.rows, planned.pieces.rows, planned.pieces.begins):
            digest = zlib.crc32(np.ascontiguousarray(part).data, digest)
        return digest


def _places(known: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the place of each row among ascending rows; -1 if it is not there."""
    if not len(known):
        return np.full(len(rows), -1)
    place = np.minimum(np.searchsorted(known, rows), len(known) - 1)
    return np.where(known[place] == rows, place, -1)


def _gather(tokens: Tokens, place: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> Tokens:
    """Returns parts of texts; zeros for those with place -1."""
    is_known = np.repeat(place >= 0, lengths)
    first = tokens.offsets[np.maximum(place, 0)] + begins - (np.cumsum(lengths) - lengths)
    index = np.repeat(first, lengths) + np.arange(lengths.sum())
    ids = np.zeros(len(index), np.int32)
    ids[is_known] = tokens.ids[index[is_known]]
    return Tokens.of(ids, lengths)
