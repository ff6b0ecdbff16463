"""Training batches of a stream of rows, block by block, with exact positions.

A block is some thousand rows. They are tokenized, shuffled and packed together. A saved position
has the place in the stream before the block, and the number of batches made of the block. So a run
that goes on reads the block again, and makes the batches that are left of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain

from lingvo_gshard.core import UserError
from lingvo_gshard.data import PackedBatch, Row, mixture_plan, stream
from lingvo_gshard.wings.preparation.streamed.examples import Examples


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the stream, between two blocks.

    Attributes:
      epoch: number of times that the whole split was read.
      number: number of examples read in this epoch.
      examples: the place among the split's examples; None for their beginning.
    """

    block: int = 0
    epoch: int = 0
    rows: int = 0
    number: int = 0
    examples: Any = None

    def to_json(self) -> dict[str, Any]:
        """Returns the position as JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of rows: the position before it, and planned batches with what makes them."""

    begin: Position
    planned: Sequence[mixture_plan.PlannedBatch]
    assembly: stream.Assembly


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Says how blocks are made.

    Attributes:
      examples: returns the examples of training from a position on.
      rows: returns the rows of an example with a given number; none for one that is left out.
      pack: returns planned batches of rows of a block with a number, and what makes them.
    """

    examples: Callable[[Any], Examples]
    rows: Callable[[Mapping[str, Any], int], Sequence[Row]]
    block_rows: int
    pack: Callable[[list[Row], int], tuple[Sequence[mixture_plan.PlannedBatch], stream.Assembly]]


class _BlockIterator(grain.DatasetIterator):
    """The blocks, epoch after epoch without an end. The state is a position."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        self._recipe = recipe
        self._move(Position())

    def _move(self, position: Position) -> None:
        self._position = position
        self._examples = self._recipe.examples(position.examples)
        self._iterator = iter(self._examples)

    def __next__(self) -> Block:
        first_epoch = self._position.epoch
        while True:
            begin, (rows, number, is_last) = self._position, self._read()
            read = begin.rows + len(rows)
            if is_last:
                self._move(Position(begin.block + 1, begin.epoch + 1, read))
            else:
                place = self._examples.get_state()
                self._position = Position(begin.block + 1, begin.epoch, read, number, place)
            if rows:
                planned, assembly = self._recipe.pack(rows, begin.block)
                if planned:
                    return Block(begin, planned, assembly)
            if self._position.epoch > first_epoch + 1:
                raise UserError(
                    "input.dataset: no row of a whole epoch fits a batch's row, or is left after "
                    "cleaning"
                )

    def _read(self) -> tuple[list[Row], int, bool]:
        """Reads a block: its rows, the number of its last example, and whether the epoch ends."""
        rows: list[Row] = []
        number = self._position.number
        while len(rows) < self._recipe.block_rows:
            example = next(self._iterator, None)
            if example is None:
                return rows, number, True
            number += 1
            rows += self._recipe.rows(example, number)
        return rows, number, False

    def get_state(self) -> dict[str, Any]:
        return self._position.to_json()

    def set_state(self, state: dict[str, Any]) -> None:
        self._move(Position(**state))


class _BatchIterator(grain.DatasetIterator):
    """The batches of blocks. The state is the position before a block, and batches made of it."""

    def __init__(self, blocks: grain.DatasetIterator):
        super().__init__(blocks)
        self._block: Block | None = None
        self._begin, self._made = blocks.get_state(), 0

    def __next__(self) -> PackedBatch:
        block = self._block or self._next_block(self._made)
        while self._made == len(block.planned):
            block = self._next_block(0)
        planned = block.planned[self._made]
        self._made += 1
        return block.assembly.batch(planned, block.assembly.read([planned]))

    def _next_block(self, made: int) -> Block:
        """Returns the next block. Some of its batches may have been made before."""
        self._block = block = next(self._parent)
        self._begin, self._made = block.begin.to_json(), made
        return block

    def get_state(self) -> dict[str, Any]:
        return {"begin": self._begin, "batch": self._made}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["begin"])
        self._block, self._begin, self._made = None, state["begin"], state["batch"]


class StreamedBatches(stream.BaseBatches):
    """Batches of a stream of rows."""

    same = "the settings of the input (input.*)"

    def __init__(self, recipe: Recipe, prefetched: int, identity: str):
        """Starts at the first batch; `prefetched` batches are made in advance by a thread."""
        blocks = stream.Stage(functools.partial(_BlockIterator, recipe))
        super().__init__(stream.prefetched_batches(_BatchIterator, blocks, prefetched), identity)

    @property
    def position(self) -> Position:
        """The position before the block that the last batch is of."""
        return Position(**self._iterator.get_state()["begin"])
