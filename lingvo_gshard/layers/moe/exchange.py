"""Exchange: moves buffers from the devices of the groups to those of the experts, and back.

With G and E on one mesh axis, `GECM` is split by groups and `EGCM` by experts. The change between
these layouts is the all-to-all. codecs.py defines the formats in which rows are sent, all_to_all.py
the layout changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers.moe import all_to_all, codecs
from lingvo_gshard.layers.moe.all_to_all import AllToAll, Direction
from lingvo_gshard.sharding import annotate

# Name scopes, within that of the layer, of the operations that move tokens to experts and back.
DISPATCH_SCOPE, COMBINE_SCOPE = "dispatch", "combine"

Compute: TypeAlias = "Callable[[tf.Tensor], tf.Tensor]"


class Exchange(Configurable):
    """Runs the experts on the buffers of all groups.

    Results do not depend on the mesh: with a `precision` rows are rounded on one device as well.
    Chunks and hierarchical all-to-alls do not change results.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "precision",
            "",
            "Type in which rows are sent: bfloat16 or int8; empty: their own.",
        )
        p.define(
            "chunks",
            1,
            "Parts that the buffers are split into, so that some are sent while others are "
            "computed.",
            minimum=1,
        )
        p.define("hierarchical", False, "Whether to use one all-to-all for each mesh axis of E.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params)
        p = self.p
        if p.precision not in codecs.CODECS:
            raise UserError(
                f"{path}.precision: {p.precision!r}. "
                f"{names.nearest(p.precision, filter(None, codecs.CODECS))}"
            )
        self._path = path

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded when they are sent."""
        return bool(self.p.precision)

    def run(self, x_GECM: tf.Tensor, compute: Compute, row: str = "M") -> tf.Tensor:
        """Returns [G,E,C,M]: the outputs of the experts for the buffers of all groups.

        Args:
          x_GECM: the buffers.
          compute: [E,G,C,M] -> [E,G,C,M], the experts. With chunks it is called once for each and
            must compute each row independently; its random numbers differ between chunks.
          row: letter of the last dimension: M, or U for a row of each part of the experts.

        Raises:
          UserError: the all-to-alls cannot be hierarchical on this mesh.
        """
        transport = all_to_all.single
        if self.p.hierarchical:
            transport = all_to_all.hierarchical(f"{self._path}.hierarchical")
        parts = _split(x_GECM, self.p.chunks, f"GEC{row}")
        direction = Direction(all_to_all.TO_EXPERTS, row)
        results = []
        for index, part in enumerate(parts):
            with _chunk_context(index):
                results.append(self._run_chunk(part, compute, direction, transport))
        return tf.concat(results, axis=2) if len(results) > 1 else results[0]

    def _run_chunk(
        self, x_GECM: tf.Tensor, compute: Compute, direction: Direction, transport: AllToAll
    ) -> tf.Tensor:
        with tf.name_scope(DISPATCH_SCOPE):
            x_EGCM = self._send(x_GECM, direction, transport)
        y_EGCM = compute(x_EGCM)
        with tf.name_scope(COMBINE_SCOPE):
            return self._send(y_EGCM, direction.reverse(), transport)

    def _send(self, x: tf.Tensor, direction: Direction, transport: AllToAll) -> tf.Tensor:
        """Returns the rows after the exchange. Their gradient is sent back with the same codec."""
        codec = codecs.CODECS[self.p.precision]
        if codec.dtype in (None, x.dtype.name):
            return transport(x, direction)

        def send_encoded(x: tf.Tensor, direction: Direction) -> tf.Tensor:
            source = direction.layouts
            sent = [annotate(part, source(part.shape.rank)[0]) for part in codec.encode(x)]
            return codec.decode([transport(part, direction) for part in sent], x.dtype)

        @custom_gradient
        def send(x: tf.Tensor):
            gradient = lambda d_y: send_encoded(d_y, direction.reverse())  # noqa: E731
            return send_encoded(x, direction), gradient

        return send(x)


def _split(x_GECM: tf.Tensor, chunks: int, layout: str) -> list[tf.Tensor]:
    """Returns parts along C whose sizes differ by at most one, none of them empty."""
    capacity = x_GECM.shape[2]
    parts = min(chunks, capacity)
    if parts < 2:
        return [x_GECM]
    sizes = [capacity * (i + 1) // parts - capacity * i // parts for i in range(parts)]
    # Without an annotation of each part, XLA sends the whole buffer and splits it afterwards.
    return [annotate(part, layout) for part in tf.split(x_GECM, sizes, axis=2)]


def _chunk_context(index: int) -> contextlib.AbstractContextManager:
    """Sets the current context with a separate key for every chunk except the first."""
    current = context.current()
    if index == 0 or current.seed is None:
        return context.use(current)
    seed = random_numbers.hashed_fold_in_word(current.seed, index)
    return context.use(dataclasses.replace(current, seed=seed))
