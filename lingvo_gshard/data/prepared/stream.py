"""The training batches of prepared data as a grain dataset.

grain runs the two stages in threads of their own and keeps their states: planning blocks and
reading their records, and making batches of a block. Three things are not left to grain:

- The order of rows and their places in batches. Both come from lengths alone, so that each process
  plans all and reads its own. grain's packing takes records, one at a time.
- Reading. grain's data source reads a list of records by a pool of threads: 10 thousand a second on
  a core for the few that a batch has of each shard. One thread that seeks them reads 300 thousand.
- Worker processes, since one thread makes a million tokens a second and more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grain
from grain.experimental import ThreadPrefetchIterDataset

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.prepared.assembly import Assembly, OwnRows, PreparedBatch, Records
from lingvo_gshard.data.prepared.planning.plan import PlannedBatch, Planner

# A block that is planned and read while the batches of the one before are used.
_BLOCKS_AHEAD = 1

ReadBlock = tuple[list[PlannedBatch], Records]


class Blocks(grain.IterDataset):
    """The planned blocks, endlessly. The state is {"block": number of the next block}."""

    def __init__(self, planner: Planner):
        """Reads a plan."""
        super().__init__()
        self._planner = planner

    def __iter__(self) -> grain.DatasetIterator:
        """Returns an iterator from the first block on."""
        return _BlockIterator(self._planner)


class _BlockIterator(grain.DatasetIterator):
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


class Batches(grain.IterDataset):
    """The batches of blocks. The state is {"block": ..., "batch": batches of it that were made}."""

    def __init__(self, blocks: grain.IterDataset, assembly: Assembly):
        """Takes blocks with their records."""
        super().__init__(blocks)
        self._assembly = assembly

    def __iter__(self) -> grain.DatasetIterator:
        """Returns an iterator from the first batch on."""
        return _BatchIterator(self._parent.__iter__(), self._assembly)


class _BatchIterator(grain.DatasetIterator):
    def __init__(self, blocks: grain.DatasetIterator, assembly: Assembly):
        super().__init__(blocks)
        self._assembly = assembly
        self._block: ReadBlock | None = None
        self._number, self._made = blocks.get_state()["block"], 0

    def __next__(self) -> PreparedBatch:
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
      planner: plans them.
      assembly: reads and makes them.
      own_rows: which rows of a batch this process needs; None for all.
      prefetched: batches made in advance by a thread; 0 for none, and no thread.
    """
    read = Blocks(planner).map(lambda block: (block, assembly.read(block, own_rows)))
    ahead = _BLOCKS_AHEAD if prefetched else 0
    read = ThreadPrefetchIterDataset(read, prefetch_buffer_size=ahead)
    batches = Batches(read, assembly)
    return ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetched)


class PreparedBatches:
    """An endless iterator over training batches whose position can be saved and restored.

    The state is a few JSON values: the numbers of a block and of a batch in it, and an identity of
    data, settings and seed, by which a state of another stream is refused. It does not depend on
    the number of processes.
    """

    def __init__(self, batches: grain.IterDataset, identity: str):
        """Starts at the first batch.

        Args:
          batches: what `dataset` returned.
          identity: a digest of data, settings and seed.
        """
        self._iterator = batches.__iter__()
        self._identity = identity

    def __iter__(self) -> PreparedBatches:
        return self

    def __next__(self) -> PreparedBatch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch returned, as JSON values."""
        return {"stream": self._identity, **self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position; ValueError if it is of a stream with other data, seed or shapes."""
        if state.get("stream") != self._identity or "batch" not in state:
            raise UserError(
                "The saved data position belongs to another stream: the training data, its "
                "settings (input.*) or the seed have changed since it was saved "
                f"({state.get('stream')!r} there, {self._identity!r} here)"
            )
        self._iterator.set_state({"block": state["block"], "batch": state["batch"]})

    def close(self) -> None:
        """Stops the threads. The iterator must not be used afterwards."""
        self._iterator.close()
