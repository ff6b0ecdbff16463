"""Exchange: moves buffers from the devices of the groups to the devices of the experts, and back.

With G and E on one mesh axis, `GECM` is split by groups and `EGCM` by experts. The change between
these layouts is the all-to-all. A `Codec` defines the format of the rows that are sent.

A module of its own adds codecs. With bfloat16, an element changes by at most half a unit in the
last place (2^-9 of itself).

`single` is one all-to-all among all devices. If several mesh axes split both G and E, as in
`G,E->host,data`, `hierarchical` uses one for each axis, last axis first. Rows for a host are then
collected within the host and cross to the other host together. With n devices on a host there are n
times fewer messages between hosts, each n times as large (Nie et al. 2022, HetuMoE, arXiv
2203.14685, section 3.2; Rajbhandari et al. 2022, DeepSpeed-MoE, arXiv 2201.05596, section 5.2).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence, Set
from typing import TypeAlias

from lingvo_gshard.core import Seam, context, random_numbers, tf
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.scopes import COMBINE_SCOPE, DISPATCH_SCOPE
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.sharding import Partitioning, Split, annotate, axes_of, current_partitioning, xla


class Codec:
    """Sends rows without compression.

    Attributes:
      dtype: name of the type that is sent; None sends the type of the rows.
      returning: the codec of rows that come back from the experts; None if they have this one.
    """

    dtype: str | None = None
    returning: Codec | None = None

    def encode(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors to send, each with the first three dimensions of x.

        Args:
          x: rows [G,E,C,M] or [E,G,C,M].
        """
        return [x]

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """Returns the rows, as `dtype`, from the tensors that `encode` returned."""
        return tf.cast(sent[0], dtype)


class Bfloat16(Codec):
    """Rounds to bfloat16, with 8 significant bits."""

    dtype = "bfloat16"

    def encode(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns the rows in bfloat16."""
        return [tf.cast(_round_to_bfloat16(tf.cast(x, tf.float32)), tf.bfloat16)]


# Codecs by the value of Exchange's `precision`.
CODECS: Seam[Codec] = Seam("codecs")
CODECS.register("")(Codec())
CODECS.register("bfloat16")(Bfloat16())


def _round_to_bfloat16(x: tf.Tensor) -> tf.Tensor:
    """Returns float32 values rounded to the nearest bfloat16, ties to even.

    The rounding works on bits: XLA may remove a cast to bfloat16 and back on one device, but not on
    many. That would change results.
    """
    return round_mantissa(x, 7)


def round_mantissa(x: tf.Tensor, bits: int) -> tf.Tensor:
    """Returns float32 values rounded to this many bits of mantissa, ties to even."""
    dropped = 23 - bits
    word = tf.bitcast(x, tf.uint32)
    constant = lambda value: tf.constant(value, tf.uint32)  # noqa: E731
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(word, constant(dropped)), constant(1))
    kept = constant(0xFFFFFFFF >> dropped << dropped)
    nearest = tf.bitwise.bitwise_and(word + constant((1 << dropped - 1) - 1) + odd, kept)
    return tf.where(tf.math.is_nan(x), x, tf.bitcast(nearest, tf.float32))


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

TO_EXPERTS, FROM_EXPERTS = "GE", "EG"


def single(x: tf.Tensor, direction: Direction) -> tf.Tensor:
    """Returns [G,E,C,...] as [E,G,C,...], or the reverse, split by its new first letter."""
    return annotate(_swap(x, 1, 1), direction.layouts(x.shape.rank)[1])


def hierarchical(option: str) -> AllToAll:
    """Returns an all-to-all with one step per mesh axis; `single` on one device.

    Args:
      option: the Params path of the option that selects it, for the message.

    Raises:
      UserError: G and E share fewer than two axes. The message names the option and `mesh`.
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


Compute: TypeAlias = "Callable[[tf.Tensor], tf.Tensor]"


class Exchange(Configurable):
    """Runs the experts on the buffers of all groups.

    Dropless dispatch has exchanges of its own (wings/dropless/exchanges.py), with these options.
    Results do not depend on the mesh: with a `precision` rows are rounded on one device as well.
    Chunks and hierarchical all-to-alls do not change results.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "precision",
            "",
            "Type in which rows are sent: bfloat16, int8, or fp8, which is for rows to the experts "
            "and leaves those that come back in bfloat16; empty: their own.",
        )
        p.define(
            "chunks",
            1,
            "Parts that the buffers, or dropless tokens, are split into, so that some are sent "
            "while others are computed.",
            minimum=1,
        )
        p.define("hierarchical", False, "Whether to take a step for each mesh axis of E.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params)
        p = self.p
        if p.precision not in CODECS:
            raise UserError(
                f"{path}.precision: {p.precision!r}. "
                f"{names.nearest(p.precision, [name for name, _ in CODECS.items() if name])}"
            )
        self.path = path

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded when they are sent."""
        return bool(self.p.precision)

    @property
    def codec(self) -> Codec:
        """The format of rows on their way to the experts."""
        return CODECS[self.p.precision]

    def transport(self) -> AllToAll:
        """Returns the all-to-all.

        Raises:
          UserError: it cannot be hierarchical on this mesh.
        """
        return hierarchical(f"{self.path}.hierarchical") if self.p.hierarchical else single

    def sizes_of_chunks(self, rows: int) -> list[int]:
        """Returns sizes that differ by at most one, of `chunks` parts or one for each row."""
        parts = max(min(self.p.chunks, rows), 1)
        return [rows * (i + 1) // parts - rows * i // parts for i in range(parts)]

    def run(self, x_GECM: tf.Tensor, compute: Compute, row: str = "M") -> tf.Tensor:
        """Returns [G,E,C,M]: the outputs of the experts for the buffers of all groups.

        Args:
          compute: [E,G,C,M] -> [E,G,C,M], the experts. With chunks it is called once for each and
            must compute each row independently; its random numbers differ between chunks.
          row: letter of the last dimension: M, or U for a row of each part of the experts.

        Raises:
          UserError: the all-to-alls cannot be hierarchical on this mesh.
        """
        transport = self.transport()
        parts = _split(x_GECM, self.sizes_of_chunks(x_GECM.shape[2]), f"GEC{row}")
        direction = Direction(TO_EXPERTS, row)
        results = []
        for index, part in enumerate(parts):
            with self.chunk_context(index):
                results.append(self._run_chunk(part, compute, direction, transport))
        return tf.concat(results, axis=2) if len(results) > 1 else results[0]

    @staticmethod
    def chunk_context(index: int) -> contextlib.AbstractContextManager:
        """Sets the current context with a separate key for every chunk except the first."""
        current = context.current()
        if index == 0 or current.seed is None:
            return context.use(current)
        seed = random_numbers.hashed_fold_in_word(current.seed, index)
        return context.use(dataclasses.replace(current, seed=seed))

    def _run_chunk(
        self, x_GECM: tf.Tensor, compute: Compute, direction: Direction, transport: AllToAll
    ) -> tf.Tensor:
        with tf.name_scope(DISPATCH_SCOPE):
            x_EGCM = self._send(x_GECM, direction, transport)
        y_EGCM = compute(x_EGCM)
        with tf.name_scope(COMBINE_SCOPE):
            return self._send(y_EGCM, direction.reverse(), transport)

    def _send(self, x: tf.Tensor, direction: Direction, transport: AllToAll) -> tf.Tensor:
        """Returns the rows after the exchange.

        In a remat unit, they may be saved ones instead (see core/autodiff/remat_policy.py), so that
        the backward pass does not send them a second time.
        """
        source, target = direction.layouts(x.shape.rank)
        saved = context.current().saved_products if _moves_rows() else None
        known = saved.restore(source, "", target) if saved else None
        if known is not None:
            return self._received(x, known, direction, transport)
        received = self._sent(x, direction, transport)
        if saved:
            saved.save(source, "", target, received)
        return received

    def _sent(self, x: tf.Tensor, direction: Direction, transport: AllToAll) -> tf.Tensor:
        """Sends rows. Their gradient is sent back with the codec of the other direction."""
        codecs = [self._codec(each) for each in (direction, direction.reverse())]
        if all(codec.dtype in (None, x.dtype.name) for codec in codecs):
            return transport(x, direction)

        def send_encoded(x: tf.Tensor, direction: Direction) -> tf.Tensor:
            source, codec = direction.layouts, self._codec(direction)
            sent = [annotate(part, source(part.shape.rank)[0]) for part in codec.encode(x)]
            return codec.decode([transport(part, direction) for part in sent], x.dtype)

        @custom_gradient
        def send(x: tf.Tensor):
            gradient = lambda d_y: send_encoded(d_y, direction.reverse())  # noqa: E731
            return send_encoded(x, direction), gradient

        return send(x)

    def _codec(self, direction: Direction) -> Codec:
        codec = self.codec
        return codec.returning or codec if direction.source == FROM_EXPERTS else codec

    def _received(
        self, x: tf.Tensor, known: tf.Tensor, direction: Direction, transport: AllToAll
    ) -> tf.Tensor:
        """Returns rows that were sent before. Their gradient is sent back."""

        @custom_gradient
        def receive(x: tf.Tensor):
            gradient = lambda d_y: self._sent(d_y, direction.reverse(), transport)  # noqa: E731
            return annotate(known, direction.layouts(known.shape.rank)[1]), gradient

        return receive(x)


def _moves_rows() -> bool:
    """Returns whether groups and experts are split over a common axis."""
    current = current_partitioning()
    if current is None:
        return False
    (groups,), (experts,) = axes_of("G"), axes_of("E")
    return any(axis in groups and current.mesh.axis_size(axis) > 1 for axis in experts)


def _split(x_GECM: tf.Tensor, sizes: Sequence[int], layout: str) -> list[tf.Tensor]:
    """Returns parts along C."""
    if len(sizes) < 2:
        return [x_GECM]
    # Without an annotation of each part, XLA sends the whole buffer and splits it afterwards.
    return [annotate(part, layout) for part in tf.split(x_GECM, sizes, axis=2)]
