"""The all-to-all between groups and experts, written as a change of layout.

`single` is one all-to-all among all devices. If several mesh axes split both G and E, as in
`G,E->host,data`, `hierarchical` uses one for each axis, last axis first. Rows for a host are then
collected within the host and cross to the other host together. With n devices on a host there are n
times fewer messages between hosts, each n times as large (Nie et al. 2022, HetuMoE, arXiv
2203.14685, section 3.2; Rajbhandari et al. 2022, DeepSpeed-MoE, arXiv 2201.05596, section 5.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence, Set
from typing import TypeAlias

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.sharding import annotate, xla
from lingvo_gshard.sharding.partitioning import Partitioning, axes_of, current_partitioning
from lingvo_gshard.sharding.strategies import Split


@dataclasses.dataclass(frozen=True)
class Direction:
    """A direction of the exchange: from groups to experts, or back.

    Attributes:
      source: the first two letters at the start, "GE" or "EG".
      row: the letter of rows: M, or U if a device along the axes of H has a row of its own.
    """

    source: str
    row: str = "M"

    def reverse(self) -> Direction:
        """Returns the opposite direction."""
        return Direction(self.source[::-1], self.row)

    def layouts(self, rank: int) -> tuple[str, str]:
        """Returns the layouts before and after the exchange.

        Args:
          rank: 4 for rows; 3 for one number per row.
        """
        rest = f"C{self.row}"[: rank - 2]
        return self.source + rest, self.source[::-1] + rest


AllToAll: TypeAlias = "Callable[[tf.Tensor, Direction], tf.Tensor]"

TO_EXPERTS = "GE"


def single(x: tf.Tensor, direction: Direction) -> tf.Tensor:
    """Returns [G,E,C,...] as [E,G,C,...], or the reverse, split by its new first letter."""
    return annotate(_swap(x, 1, 1), direction.layouts(x.shape.rank)[1])


def hierarchical(option: str) -> AllToAll:
    """Returns an all-to-all with one step per mesh axis; `single` on one device.

    Args:
      option: the Params path of the option that selects it, for the message.

    Raises:
      UserError: G and E share fewer than two axes. The message names the option and --mesh.
    """
    current = current_partitioning()
    if current is None or current.mesh.size == 1 or tf.executing_eagerly():
        return single
    (groups,), (experts,) = axes_of("G"), axes_of("E")
    shared = [axis for axis in experts if axis in groups]
    if len(shared) < 2:
        raise UserError(
            f"{option}: `mesh={current.mesh}` with `strategy={current.strategy.name}` splits "
            f"groups over {_join_names(groups)} and experts over {_join_names(experts)}; it needs "
            "two axes that split both, as in `mesh=host=2,data=4` "
            "`strategy='activations: B,G->host,data | E->host,data'`"
        )
    return lambda x, direction: _run_in_steps(x, direction, current, shared[::-1])


def _join_names(axes: Sequence[str]) -> str:
    return " and ".join(axes) or "nothing"


def _run_in_steps(
    x: tf.Tensor, direction: Direction, current: Partitioning, order: Sequence[str]
) -> tf.Tensor:
    """Changes the layout one mesh axis at a time.

    Each of the first two dimensions is split into one dimension for each of its mesh axes, major
    axis first, and one for the rest. A step then moves one axis from a dimension of the source
    letter to one of the target letter.
    """
    source, target = direction.layouts(x.shape.rank)
    (first,), (second,) = map(axes_of, direction.source)
    sizes = x.shape[:2].as_list()
    x = _split_by_axis(x, first, second, current)
    rest = axes_of(source)[2:]
    held = set(first)
    for axis in (None, *order):
        held.discard(axis)
        split = (*_splits(first, held), *_splits(second, set(second) - held), *rest)
        x = xla.tile(x, split, current.mesh)
    x = _swap(x, len(first) + 1, len(second) + 1)
    return annotate(_merge(x, len(second) + 1, len(first) + 1, sizes[::-1]), target)


def _splits(axes: Sequence[str], held: Set[str]) -> Split:
    """Returns the split of each part of a dimension: over its axis if the axis is held."""
    return (*((axis,) if axis in held else () for axis in axes), ())


def _split_by_axis(
    x: tf.Tensor, first: Sequence[str], second: Sequence[str], current: Partitioning
) -> tf.Tensor:
    """Returns x with its first two dimensions split by mesh axis, padded with zeros if uneven."""
    shape, padding = [], []
    for size, axes in zip(x.shape[:2], (first, second), strict=True):
        rest_size = -(-size // current.parts(axes))
        shape += [*(current.mesh.axis_size(axis) for axis in axes), rest_size]
        padding.append(rest_size * current.parts(axes) - size)
    rest = x.shape[2:].as_list()
    if any(padding):
        x = tf.pad(x, [[0, p] for p in padding] + [[0, 0] for _ in rest])
    return tf.reshape(x, [*shape, *rest])


def _swap(x: tf.Tensor, first: int, second: int) -> tf.Tensor:
    """Returns x with its first `first` dimensions moved after the next `second` dimensions."""
    order = list(range(x.shape.rank))
    both = first + second
    return tf.transpose(x, order[first:both] + order[:first] + order[both:])


def _merge(x: tf.Tensor, first: int, second: int, sizes: Sequence[int]) -> tf.Tensor:
    """Reverses `_split_by_axis`: merges the leading dimensions into two of these sizes."""
    shape, both = known_sizes(x.shape), first + second
    padded = [math.prod(shape[:first]), math.prod(shape[first:both])]
    x = tf.reshape(x, [*padded, *shape[both:]])
    return x if padded == list(sizes) else x[: sizes[0], : sizes[1]]
