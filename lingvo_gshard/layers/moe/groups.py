"""Groups: splits the tokens of a batch into groups of S that are routed independently.

Without a mesh, groups are numbered row by row. If L and G are split over the same devices, groups
consist of the same tokens but are reordered so that the groups of a device are adjacent. Each group
then stays on the device that has its tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math

import numpy as np

from lingvo_gshard.core import random_numbers, tf
from lingvo_gshard.layers import token_context
from lingvo_gshard.sharding import Mesh, annotate, axes_of, current_partitioning, xla


@dataclasses.dataclass(frozen=True)
class Groups:
    """Split of the tokens [B,L] of a batch into groups. The last group is padded.

    Attributes:
      length: size of L.
      size: size of S.
      pieces: number of pieces of each row. Groups are numbered piece by piece: the groups of all
        first pieces come first.
    """

    rows: int
    length: int
    size: int
    pieces: int = 1

    @classmethod
    def for_batch(cls, rows: int, length: int, group_size: int) -> Groups:
        """Returns the groups of a batch [B,L] under the current partitioning."""
        size = min(group_size, rows * length)
        return cls(rows, length, size, _count_pieces(rows, length, size))

    @property
    def count(self) -> int:
        """Size of G."""
        return -(-self.rows * self.length // self.size)

    def split(self, x: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,...] as groups [G,S,...], padded with zeros."""
        rest = x.shape[2:].as_list()
        x = self._annotate(x, ("B", "L"))
        if self.pieces > 1:
            x = tf.reshape(x, [self.rows, self.pieces, self.length // self.pieces, *rest])
            x = self._annotate(x, ("B", "L", ""))
            x = self._annotate(_swap_first_two(x), ("L", "B", ""))
        tokens = self.rows * self.length
        x = tf.reshape(x, [tokens, *rest])
        x = tf.pad(x, [[0, self.count * self.size - tokens], *([0, 0] for _ in rest)])
        return annotate(tf.reshape(x, [self.count, self.size, *rest]), "GSM"[: 2 + len(rest)])

    def merge(self, y_GSM: tf.Tensor) -> tf.Tensor:
        """Returns groups [G,S,M] as [B,L,M], without the padding."""
        model_dim = y_GSM.shape[-1]
        y = tf.reshape(y_GSM, [-1, model_dim])[: self.rows * self.length]
        if self.pieces > 1:
            length = self.length // self.pieces
            y = tf.reshape(y, [self.pieces, self.rows, length, model_dim])
            y = self._annotate(y, ("L", "B", ""))
            y = self._annotate(_swap_first_two(y), ("B", "L", ""))
        y = tf.reshape(y, [self.rows, self.length, model_dim])
        return annotate(self._annotate(y, ("B", "L")), "BLM")

    def _annotate(self, x: tf.Tensor, letters: tuple[str, ...]) -> tf.Tensor:
        """Annotates x with B split like rows and L like pieces. Has no effect if L is not split.

        Args:
          x: a tensor with at least as many dimensions as there are letters.
          letters: "B", "L" or "" for each of the first dimensions.
        """
        current = current_partitioning()
        rows, positions, _ = axes_of("BLM")
        if current is None or not positions:
            return x
        pieces = _shared_axes() if self.pieces > 1 else ()
        axes = {"B": rows, "L": pieces, "": ()}
        split = [axes[letter] for letter in letters]
        return xla.tile(x, (*split, *((),) * (x.shape.rank - len(split))), current.mesh)

    def cross_parts(self) -> bool:
        """Returns whether devices must gather rows that are split along L to form groups."""
        current = current_partitioning()
        return current is not None and current.parts(_shared_axes()) > self.pieces

    def ordered(self) -> contextlib.AbstractContextManager:
        """Declares the order of the groups in tensors [G,...] that a `with` block computes.

        Random numbers then do not depend on the order, and gshard-verify compares equal groups.
        """
        if self.pieces == 1:
            return token_context.override(groups=self, group_order=None)
        order = token_context.GroupOrder(self._numbers(), computed=self._computed_numbers())
        return token_context.override(groups=self, group_order=order)

    def in_order(self, by_group_G: tf.Tensor) -> tf.Tensor:
        """Returns a tensor [G,...] in the order of the groups with a single piece per row."""
        if self.pieces == 1:
            return by_group_G
        by_piece = tf.reshape(by_group_G, [self.pieces, self.rows, -1, *by_group_G.shape[1:]])
        return tf.reshape(_swap_first_two(by_piece), by_group_G.shape)

    def _numbers(self) -> np.ndarray:
        """Returns the number [G] that each group would have with a single piece per row."""
        by_row = np.arange(self.count).reshape(self.rows, self.pieces, -1)
        return by_row.transpose(1, 0, 2).reshape(-1)

    def _computed_numbers(self) -> tf.Tensor:
        """Returns the same numbers [G] as a computation."""
        by_row = tf.reshape(tf.range(self.count), [self.rows, self.pieces, -1])
        return tf.reshape(_swap_first_two(by_row), [-1])


def ordered_along(dimension: int) -> contextlib.AbstractContextManager:
    """Declares that G is another dimension of the tensors that a `with` block computes."""
    order = token_context.current().group_order
    order = dataclasses.replace(order, dimension=dimension) if order else None
    return token_context.override(group_order=order)


def uniform(shape: tf.TensorShape, key: tf.Tensor) -> tf.Tensor:
    """Returns float32 random numbers uniform in (0, 1) of shape [G,S,...].

    Within `Groups.ordered` a group has the same numbers in any order of the groups.

    Args:
      key: int32 [2].
    """
    order = token_context.current().group_order
    return random_numbers.hashed_uniform(shape, key, order.computed if order else None)


def _count_pieces(rows: int, length: int, size: int) -> int:
    """Returns the number of pieces of each row.

    Each shard of L is one piece if it divides into groups and G is split like B and L together.
    Otherwise a row is a single piece.
    """
    current = current_partitioning()
    if current is None or tf.executing_eagerly():
        return 1
    pieces = current.parts(_shared_axes())
    row_axes, group_axes = axes_of("BLM")[0], axes_of("GSM")[0]
    is_local = group_axes == (*_shared_axes(), *row_axes)
    is_even = rows % current.parts(row_axes) == 0 and length % (pieces * size) == 0
    return pieces if is_local and is_even else 1


def _shared_axes() -> tuple[str, ...]:
    """Returns the axes that split both L and G."""
    groups = axes_of("GSM")[0]
    return tuple(axis for axis in axes_of("BLM")[1] if axis in groups)


def _swap_first_two(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])


_log = logging.getLogger(__name__)
# Axes that rows and weights may be split over: where one has the experts, the other has the rest.
_OTHER_AXES = {"data": "fsdp", "fsdp": "data"}


def warn_of_groups(groups: Groups, path: str) -> None:
    """Warns of a group_size that causes padding or communication between devices."""
    current = current_partitioning()
    if current is None:
        return
    parts = current.parts(current.split("G", path=path)[0])
    if groups.count % parts:
        _log.warning(
            f"{path}: {groups.count} token groups do not divide evenly over {parts} devices. "
            f"Choose a group_size that gives a multiple of {parts} groups to avoid padding and "
            "extra communication."
        )
    if groups.cross_parts():
        _log.warning(
            f"{path}.group_size: groups of {groups.size} tokens cross the devices that rows of "
            f"{groups.length} positions are split over. Choose a group_size that divides the part "
            "of one device to avoid gathering the rows."
        )


def warn_of_experts(num_experts: int, path: str) -> None:
    """Warns if devices compute experts that do not exist, and names a mesh without them."""
    current = current_partitioning()
    if current is None:
        return
    axes = current.split("E", path=path)[0]
    parts = current.parts(axes)
    if num_experts % parts == 0:
        return
    padded = math.ceil(num_experts / parts) * parts
    advice = ""
    if len(axes) == 1:
        mesh = _even_mesh(current.mesh, axes[0], num_experts)
        advice = f" On `mesh={mesh}` they do."
    _log.warning(
        f"{path}: {num_experts} experts do not divide evenly over {parts} devices along "
        f"{' and '.join(axes)}: {1 - num_experts / padded:.0%} of the experts' time is padding."
        f"{advice}"
    )


def _even_mesh(mesh: Mesh, axis: str, num_experts: int) -> Mesh:
    """Returns a mesh on whose axis the experts divide evenly; a second axis has the rest."""
    other = _OTHER_AXES.get(axis, "fsdp")
    size = math.gcd(num_experts, mesh.axis_size(axis))
    rest = mesh.axis_size(axis) // size
    axes = []
    for name, given in mesh.axes:
        axes.append((name, size if name == axis else given * rest if name == other else given))
        if name == axis and other not in mesh.names:
            axes.append((other, rest))
    return Mesh(tuple(axes), mesh.device_order)
