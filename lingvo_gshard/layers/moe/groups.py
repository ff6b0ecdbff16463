"""Groups: the tokens of rows cut into groups of S, and rows again.

Without a mesh groups are numbered along one row after another. Where L is split over devices that G
is split over too, a group is still made of the same tokens, and stays on the device that has them:
groups are put in another order, in which each device's stand side by side.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.sharding import annotate, xla
from lingvo_gshard.sharding.partitioning import axes_of, current_partitioning


@dataclasses.dataclass(frozen=True)
class Groups:
    """How rows [B,L] are cut. pieces: into how many every row is cut before it is into groups.

    The groups of all first pieces come first. The last group is filled up.
    """

    rows: int
    length: int
    size: int
    pieces: int = 1

    @classmethod
    def of(cls, rows: int, length: int, group_size: int) -> Groups:
        """Returns the groups of a batch, cut into pieces as the partitioning in use asks for."""
        size = min(group_size, rows * length)
        return cls(rows, length, size, _count_pieces(rows, length, size))

    @property
    def count(self) -> int:
        """The number of groups, G."""
        return -(-self.rows * self.length // self.size)

    def cut(self, x: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,...] of [B,L,...], filled up with zeros."""
        rest = x.shape[2:].as_list()
        x = self._split(x, ("B", "L"))
        if self.pieces > 1:
            x = tf.reshape(x, [self.rows, self.pieces, self.length // self.pieces, *rest])
            x = self._split(x, ("B", "L", ""))
            x = self._split(_first_two_swapped(x), ("L", "B", ""))
        tokens = self.rows * self.length
        x = tf.reshape(x, [tokens, *rest])
        x = tf.pad(x, [[0, self.count * self.size - tokens], *([0, 0] for _ in rest)])
        return annotate(tf.reshape(x, [self.count, self.size, *rest]), "GSM"[: 2 + len(rest)])

    def joined(self, y_GSM: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M]: the reverse."""
        model_dim = y_GSM.shape[-1]
        y = tf.reshape(y_GSM, [-1, model_dim])[: self.rows * self.length]
        if self.pieces > 1:
            length = self.length // self.pieces
            y = tf.reshape(y, [self.pieces, self.rows, length, model_dim])
            y = self._split(y, ("L", "B", ""))
            y = self._split(_first_two_swapped(y), ("B", "L", ""))
        y = tf.reshape(y, [self.rows, self.length, model_dim])
        return annotate(self._split(y, ("B", "L")), "BLM")

    def _split(self, x: tf.Tensor, letters: tuple[str, ...]) -> tf.Tensor:
        """Annotated as rows are split, and L as pieces are; the identity where no L is split."""
        current = current_partitioning()
        rows, positions, _ = axes_of("BLM")
        if current is None or not positions:
            return x
        pieces = _shared() if self.pieces > 1 else ()
        axes = {"B": rows, "L": pieces, "": ()}
        split = [axes[letter] for letter in letters]
        return xla.tile(x, (*split, *((),) * (x.shape.rank - len(split))), current.mesh)

    def cross_parts(self) -> bool:
        """Whether L and G are split over devices that must gather rows to make groups of them."""
        current = current_partitioning()
        return current is not None and current.parts(_shared()) > self.pieces

    def in_use(self) -> contextlib.AbstractContextManager:
        """Makes random numbers of groups independent of their order, inside a `with` block."""
        return context.override(group_order=self._numbers() if self.pieces > 1 else None)

    def _numbers(self) -> np.ndarray:
        """The number [G] that each group would have were there one piece."""
        by_row = np.arange(self.count).reshape(self.rows, self.pieces, -1)
        return by_row.transpose(1, 0, 2).reshape(-1)


def drawn(shape: tf.TensorShape, key: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers uniform in (0, 1) for [G,S,...], a group's the same in any order."""
    return random_numbers.hashed_uniform(shape, key, context.current().group_order)


def _count_pieces(rows: int, length: int, size: int) -> int:
    """One for each part of a row, where a part is whole groups and G is split as B and L are."""
    current = current_partitioning()
    if current is None or tf.executing_eagerly():
        return 1
    pieces = current.parts(_shared())
    of_rows, of_groups = axes_of("BLM")[0], axes_of("GSM")[0]
    is_local = of_groups == (*_shared(), *of_rows)
    is_even = rows % current.parts(of_rows) == 0 and length % (pieces * size) == 0
    return pieces if is_local and is_even else 1


def _shared() -> tuple[str, ...]:
    """The axes that split both L and G."""
    groups = axes_of("GSM")[0]
    return tuple(axis for axis in axes_of("BLM")[1] if axis in groups)


def _first_two_swapped(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])
