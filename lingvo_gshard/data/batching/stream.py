"""The training batches of a table as a grain dataset.

grain runs the two stages in threads of their own and keeps their states: planning blocks and
reading their records, and making batches of a block. Three things are not left to grain:

- The order of rows and their places in batches. Both come from lengths alone, so that each process
  plans all rows and reads its own rows. grain's packing takes records, one at a time.
- Reading. grain's data source reads a list of records by a pool of threads: 10 thousand a second on
  a core for the few that a batch has of each shard. One thread that seeks them reads 300 thousand.
- Worker processes, since one thread makes a million tokens a second and more.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.batching.mixture_plan import Bucket, Pieces, PlannedBatch, Planner
from lingvo_gshard.data.batching.packing import Batch, PackedBatch, Side, Tokens
from lingvo_gshard.data.batching.table import Records, Table

# This many blocks are planned and read while batches of the block before them are used.
_BLOCKS_AHEAD = 1


ReadBlock = tuple[list[PlannedBatch], Records]


class Stage(grain.IterDataset):
    """A dataset whose iterator a function makes, of the iterators of the datasets before it."""

    def __init__(self, make: Callable[..., grain.DatasetIterator], *before: grain.IterDataset):
        """Takes the function and its datasets."""
        super().__init__(before)
        self._make = make

    def __iter__(self) -> grain.DatasetIterator:
        """Returns an iterator from the first element on."""
        return self._make(*(parent.__iter__() for parent in self._parents))


class _BlockIterator(grain.DatasetIterator):
    """The planned blocks, endlessly. The state is {"block": number of the next block}."""

    def __init__(self, planner: Planner):
        super().__init__()
        self._planner = planner
        self.set_state({"block": 0})

    def __next__(self) -> list[PlannedBatch]:
        block = next(self._blocks)
        self._next += 1
        return block

    def get_state(self) -> dict[str, Any]:
        return {"block": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next: int = state["block"]
        self._blocks: Iterator[list[PlannedBatch]] = self._planner.blocks(self._next)


class _BatchIterator(grain.DatasetIterator):
    """The batches of blocks. The state is {"block": ..., "batch": batches made of the block}."""

    def __init__(self, assembly: Assembly, blocks: grain.DatasetIterator):
        super().__init__(blocks)
        self._assembly = assembly
        self._block: ReadBlock | None = None
        self._number, self._made = blocks.get_state()["block"], 0

    def __next__(self) -> PartialBatch:
        while self._block is None or self._made == len(self._block[0]):
            if self._block is not None:
                self._number, self._made = self._number + 1, 0
            self._block = next(self._parent)
        planned, records = self._block
        batch = self._assembly.batch(planned[self._made], records)
        self._made += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"block": self._number, "batch": self._made}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state({"block": state["block"]})
        self._block, self._number, self._made = None, state["block"], state["batch"]


def dataset(
    planner: Planner, assembly: Assembly, own_rows: OwnRows | None, prefetched: int
) -> grain.IterDataset:
    """Returns the endless training batches.

    Args:
      own_rows: which rows of a batch this process needs; None for all.
      prefetched: batches made in advance by a thread; 0 for none, and no thread.
    """
    blocks = Stage(functools.partial(_BlockIterator, planner))
    read = blocks.map(lambda block: (block, assembly.read(block, own_rows)))
    return prefetched_batches(functools.partial(_BatchIterator, assembly), read, prefetched)


def prefetched_batches(
    make: Callable[[grain.DatasetIterator], grain.DatasetIterator],
    blocks: grain.IterDataset,
    prefetched: int,
) -> grain.IterDataset:
    """Returns the batches of blocks, both read in advance by threads.

    Args:
      make: returns an iterator over the batches of an iterator's blocks.
      prefetched: batches made in advance; 0 for none, and no thread.
    """
    ahead = _BLOCKS_AHEAD if prefetched else 0
    batches = Stage(make, ThreadPrefetchIterDataset(blocks, prefetch_buffer_size=ahead))
    return ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetched)


class BaseBatches(abc.ABC):
    """An endless iterator over training batches whose position can be saved and restored.

    A position has an identity of data, settings and seed. One with another identity is refused.
    """

    # Names the settings that a saved position belongs to, for messages.
    same: ClassVar[str]

    def __init__(self, batches: grain.IterDataset, identity: str):
        """Starts at the first batch.

        Args:
          identity: a digest of data, settings and seed.
        """
        self._iterator = batches.__iter__()
        self._identity = identity

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch returned, as JSON values."""
        return {"stream": self._identity, **self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position.

        Raises:
          UserError: the position is of a stream with other data, settings or seed.
        """
        if state.get("stream") != self._identity:
            raise UserError(
                f"The saved data position belongs to another stream: {self.same} or the seed have "
                f"changed since it was saved ({state.get('stream')!r} there, {self._identity!r} "
                "here)"
            )
        self._iterator.set_state({k: value for k, value in state.items() if k != "stream"})

    def close(self) -> None:
        """Stops the threads. The iterator must not be used afterwards."""
        self._iterator.close()


class PlannedBatches(BaseBatches):
    """Batches that a planner plans.

    The state is a few JSON values: the numbers of a block and of a batch in it, and the identity.
    The number of processes does not matter.
    """

    same = "the training data, its settings (input.*)"

    def set_state(self, state: Mapping[str, Any]) -> None:
        if "carried" in state:
            raise UserError(
                'The saved data position has the format {"block", "batch", "carried"} of versions '
                "whose corpora in memory had a plan of batches of their own. This version has the "
                'format {"block", "batch"} and another plan, so it cannot go on there. Resume with '
                "the version that began the run, or begin a new run with its weights (init_from)"
            )
        super().set_state(state)


# Returns which rows of a batch of a bucket this process needs, bool [B]; None for all.
OwnRows = Callable[[int], "np.ndarray | None"]


class PartialBatch(PackedBatch):
    """A batch that may lack the tokens of other processes' rows, but not their segments.

    Attributes:
      digest: a CRC-32 of the pieces and their places, the same in all processes.
    """

    def __init__(self, arrays: PackedBatch, read_all: Callable[[], Batch], digest: int):
        """Takes over the arrays.

        Args:
          arrays: the batch as this process knows it.
          read_all: returns the batch with the tokens of all rows.
        """
        super().__init__(arrays)
        self.examples, self.digest, self._read_all = arrays.examples, digest, read_all

    def whole(self) -> Batch:
        return self._read_all()


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Makes batches.

    Attributes:
      buckets: rows, source length and target length of the batches of each bucket.
      before: the id before the first token of each target.
      identity: a digest of data and settings.
      finish: changes the arrays of a batch; None changes nothing.
    """

    table: Table
    buckets: Sequence[Bucket]
    before: int
    has_sources: bool
    identity: str = ""
    finish: Callable[[Batch], Batch] | None = None

    def read(self, batches: Sequence[PlannedBatch], own_rows: OwnRows | None = None) -> Records:
        """Reads the records of batches: of `own_rows` only, if they are given.

        Raises:
          UserError: a shard cannot be read.
        """
        needed = [np.zeros(0, np.int64)]
        for batch in batches:
            own = own_rows(batch.bucket) if own_rows else None
            rows = batch.pieces.rows
            needed.append(rows if own is None else rows[own[batch.rows]])
        return self.table.read(np.concatenate(needed))

    def batch(self, planned: PlannedBatch, records: Records) -> PartialBatch:
        """Returns a batch. Rows without records have no tokens, and damaged ones are left out.

        Segments count from 1 in each row; the two sides of a piece have the same number, and
        padding has 0. Positions restart in each segment. The inputs of a segment are the token
        before it, `before` at the beginning of a text, and its labels without the last one.

        Returns:
          int32 arrays: source_{ids,segments,positions} [B,K], if there are sources, and
          target_{inputs,labels,segments,positions} [B,L]. With marks also target_marks [B,L].
        """
        pieces, rows = planned.pieces, planned.rows
        place = records.places_of(pieces.rows)
        if records.rows is not None:
            kept = place < 0
            known = place[~kept]
            kept[~kept] = records.sources.lengths_of(known) + records.targets.lengths_of(known) > 0
            pieces, rows, place = pieces[kept], rows[kept], place[kept]
        arrays = self._sources(pieces, rows, place, records, planned.bucket)
        arrays |= self._targets(pieces, rows, place, records, planned.bucket)
        arrays = self.finish(arrays) if self.finish else arrays
        return PartialBatch(
            PackedBatch.of(arrays, rows, pieces.rows),
            lambda: self.batch(planned, self.read([planned])),
            self._digest(planned),
        )

    def _sources(
        self, pieces: Pieces, rows: np.ndarray, place: np.ndarray, records: Records, bucket: int
    ) -> Batch:
        if not self.has_sources:
            return {}
        batch_rows, length, _ = self.buckets[bucket]
        side = Side(rows, pieces.lengths[:, 0], (batch_rows, length))
        return {
            "source_ids": side.scatter(side.gather(records.sources, place, pieces.begins)),
            "source_segments": side.scatter(side.segments),
            "source_positions": side.scatter(side.positions),
        }

    def _targets(
        self, pieces: Pieces, rows: np.ndarray, place: np.ndarray, records: Records, bucket: int
    ) -> Batch:
        batch_rows, _, length = self.buckets[bucket]
        side = Side(rows, pieces.lengths[:, 1], (batch_rows, length))
        labels = side.gather(records.targets, place, pieces.begins)
        inputs = np.empty_like(labels)
        inputs[1:] = labels[:-1]
        inputs[side.positions == 0] = self._tokens_before(pieces, place, records.targets)
        arrays = {
            "target_inputs": side.scatter(inputs),
            "target_labels": side.scatter(labels),
            "target_segments": side.scatter(side.segments),
            "target_positions": side.scatter(side.positions),
        }
        if records.marks is not None:
            marks = side.gather(records.marks, place, pieces.begins)
            arrays["target_marks"] = side.scatter(marks)
        return arrays

    def _tokens_before(self, pieces: Pieces, place: np.ndarray, targets: Tokens) -> np.ndarray:
        """Returns the id before each piece, int32; 0 for those within rows without records."""
        result = np.where(pieces.begins > 0, 0, self.before).astype(np.int32)
        within = (pieces.begins > 0) & (place >= 0)
        result[within] = targets.ids[targets.offsets[place[within]] + pieces.begins[within] - 1]
        return result

    def _digest(self, planned: PlannedBatch) -> int:
        digest = zlib.crc32(f"{self.identity} {planned.bucket}".encode())
        for part in (planned.rows, planned.pieces.rows, planned.pieces.begins):
            digest = zlib.crc32(np.ascontiguousarray(part).data, digest)
        return digest
