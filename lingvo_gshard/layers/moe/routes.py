"""Routes between groups and experts: the changes of layout that become all-to-alls.

Directly it is one all-to-all among all devices. Where G and E are split over several axes of the
mesh, such as `G,E->host,data`, there may be one for each axis, the last axis first: rows for a host
are gathered within the host and cross to it together, so that messages between hosts are fewer by
the number of a host's devices, and larger by as much (Nie et al. 2022, HetuMoE, arXiv 2203.14685,
section 3.2; Rajbhandari et al. 2022, DeepSpeed-MoE, arXiv 2201.05596, section 5.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence, Set

import tensorflow as tf

from lingvo_gshard.sharding import annotate, xla
from lingvo_gshard.sharding.partitioning import Partitioning, axes_of, current_partitioning
from lingvo_gshard.sharding.strategies import Split


@dataclasses.dataclass(frozen=True)
class Way:
    """From tensors whose layout begins with two letters to those where they have changed places."""

    source: str

    def back(self) -> Way:
        """The other way."""
        return Way(self.source[::-1])

    def layouts(self, rank: int) -> tuple[str, str]:
        """Layouts of that rank at both ends: of rows with M, of a number for each row without."""
        rest = "CM"[: rank - 2]
        return self.source + rest, self.source[::-1] + rest


Route = Callable[[tf.Tensor, Way], tf.Tensor]

TO_EXPERTS, TO_GROUPS = Way("GE"), Way("EG")


def direct(x: tf.Tensor, way: Way) -> tf.Tensor:
    """Returns [G,E,C,...] as [E,G,C,...], or the other way, split by its new first letter."""
    return annotate(_swapped(x, 1, 1), way.layouts(x.shape.rank)[1])


def by_axis(option: str) -> Route:
    """Returns the route in steps of one axis each; where nothing is split, the direct one.

    Raises ValueError naming the option and --mesh where G and E share fewer than two axes.
    """
    current = current_partitioning()
    if current is None or current.mesh.size == 1 or tf.executing_eagerly():
        return direct
    (groups,), (experts,) = axes_of("G"), axes_of("E")
    shared = [axis for axis in experts if axis in groups]
    if len(shared) < 2:
        raise ValueError(
            f"{option}: --mesh={current.mesh} with --strategy={current.strategy.name} splits "
            f"groups over {_in_words(groups)} and experts over {_in_words(experts)}; it needs two "
            "axes that both are split over, as in --mesh=host=2,data=4 "
            "--strategy='activations: B,G->host,data | E->host,data'"
        )
    return lambda x, way: _in_steps(x, way, current, shared[::-1])


def _in_words(axes: Sequence[str]) -> str:
    return " and ".join(axes) or "nothing"


def _in_steps(x: tf.Tensor, way: Way, current: Partitioning, order: Sequence[str]) -> tf.Tensor:
    """The change of layout, one axis after the other.

    Both dimensions are cut into one for each axis they may be split over, the major one first, and
    one for what is left, so that a step takes an axis from one dimension to another.
    """
    source, target = way.layouts(x.shape.rank)
    (first,), (second,) = map(axes_of, way.source)
    sizes = x.shape[:2].as_list()
    x = _cut(x, first, second, current)
    rest = axes_of(source)[2:]
    held = set(first)
    for axis in (None, *order):
        held.discard(axis)
        split = (*_split(first, held), *_split(second, set(second) - held), *rest)
        x = xla.tile(x, split, current.mesh)
    x = _swapped(x, len(first) + 1, len(second) + 1)
    return annotate(_joined(x, len(second) + 1, len(first) + 1, sizes[::-1]), target)


def _split(axes: Sequence[str], held: Set[str]) -> Split:
    """Of the dimensions that one was cut into, those whose axes it holds are split over them."""
    return (*((axis,) if axis in held else () for axis in axes), ())


def _cut(
    x: tf.Tensor, first: Sequence[str], second: Sequence[str], current: Partitioning
) -> tf.Tensor:
    """The first two dimensions, cut; filled up with zeros where they do not divide."""
    shape, missing = [], []
    for size, axes in zip(x.shape[:2], (first, second), strict=True):
        left = -(-size // current.parts(axes))
        shape += [*(current.mesh.axis_size(axis) for axis in axes), left]
        missing.append(left * current.parts(axes) - size)
    rest = x.shape[2:].as_list()
    if any(missing):
        x = tf.pad(x, [[0, m] for m in missing] + [[0, 0] for _ in rest])
    return tf.reshape(x, [*shape, *rest])


def _swapped(x: tf.Tensor, first: int, second: int) -> tf.Tensor:
    """The first so many dimensions and the so many after them, exchanged."""
    order = list(range(x.shape.rank))
    both = first + second
    return tf.transpose(x, order[first:both] + order[:first] + order[both:])


def _joined(x: tf.Tensor, first: int, second: int, sizes: Sequence[int]) -> tf.Tensor:
    """What `_cut` cut, as two dimensions of these sizes again."""
    shape, both = x.shape.as_list(), first + second
    whole = [math.prod(shape[:first]), math.prod(shape[first:both])]
    x = tf.reshape(x, [*whole, *shape[both:]])
    return x if whole == list(sizes) else x[: sizes[0], : sizes[1]]
