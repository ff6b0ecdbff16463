"""Exchange: rows of tokens from the devices that have them to those that have their experts.

With G and E on one mesh axis, `GECM` is split by groups and `EGCM` by experts: the step from one to
the other is the all-to-all. What rows are written as on the way is said in wire.py, by which steps
they go in routes.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.layers.moe import routes, wire
from lingvo_gshard.sharding import annotate

# Name scopes, within that of the layer, of what moves tokens to experts and back.
DISPATCH_SCOPE, COMBINE_SCOPE = "dispatch", "combine"

Compute = Callable[[tf.Tensor], tf.Tensor]


class Exchange(Configurable):
    """Has experts compute what groups have put into their buffers.

    What the options give up or change does not depend on the mesh: rows are rounded to `precision`
    on one device as on many. Chunks and hierarchical all-to-alls give the same numbers as without.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("precision", "", "Type of rows under way: bfloat16, int8; empty: as they are.")
        p.define("chunks", 1, "Parts of the buffers, which can travel while others are computed.")
        p.define("hierarchical", False, "Whether each mesh axis of E has an all-to-all of its own.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params)
        p = self.p
        if p.precision not in wire.FORMATS:
            raise ValueError(
                f"{path}.precision: {p.precision!r}. "
                f"{names.nearest(p.precision, filter(None, wire.FORMATS))}"
            )
        if p.chunks < 1:
            raise ValueError(f"{path}.chunks: {p.chunks}; a positive number was expected")
        self._path = path

    def run(self, x_GECM: tf.Tensor, compute: Compute) -> tf.Tensor:
        """Returns [G,E,C,M], compute([E,G,C,M]) of the experts' inputs, back at their groups.

        With chunks, compute is called for each and must take every row by itself; what it draws at
        random differs from chunk to chunk. Raises ValueError naming the option and --mesh if
        all-to-alls cannot be hierarchical there.
        """
        route = routes.direct
        if self.p.hierarchical:
            route = routes.by_axis(f"{self._path}.hierarchical")
        parts = _cut(x_GECM, self.p.chunks)
        results = []
        for index, part in enumerate(parts):
            with _drawing_apart(index):
                results.append(self._run(part, compute, route))
        return tf.concat(results, axis=2) if len(results) > 1 else results[0]

    def _run(self, x_GECM: tf.Tensor, compute: Compute, route: routes.Route) -> tf.Tensor:
        with tf.name_scope(DISPATCH_SCOPE):
            x_EGCM = self._carry(x_GECM, routes.TO_EXPERTS, route)
        y_EGCM = compute(x_EGCM)
        with tf.name_scope(COMBINE_SCOPE):
            return self._carry(y_EGCM, routes.TO_GROUPS, route)

    def _carry(self, x: tf.Tensor, way: routes.Way, route: routes.Route) -> tf.Tensor:
        """Rows at the other end; their gradient comes back by the same means."""
        form = wire.FORMATS[self.p.precision]
        if form.dtype in (None, x.dtype):
            return route(x, way)

        def there(x: tf.Tensor, way: routes.Way) -> tf.Tensor:
            sent = [annotate(part, way.layouts(part.shape.rank)[0]) for part in form.write(x)]
            return form.read([route(part, way) for part in sent], x.dtype)

        @custom_gradient
        def carry(x: tf.Tensor):
            return there(x, way), lambda d_y: there(d_y, way.back())

        return carry(x)


def _cut(x_GECM: tf.Tensor, chunks: int) -> list[tf.Tensor]:
    """Parts along C whose sizes differ by one at most, none of them empty."""
    capacity = x_GECM.shape[2]
    parts = min(chunks, capacity)
    if parts < 2:
        return [x_GECM]
    sizes = [capacity * (i + 1) // parts - capacity * i // parts for i in range(parts)]
    # Said of each, or XLA has the whole travel and cuts it after that.
    return [annotate(part, "GECM") for part in tf.split(x_GECM, sizes, axis=2)]


def _drawing_apart(index: int) -> contextlib.AbstractContextManager:
    """The context of one chunk: the same, but for the key of what is drawn in all but the first."""
    now = context.current()
    if index == 0 or now.seed is None:
        return context.use(now)
    seed = random_numbers.hashed_fold_in_word(now.seed, index)
    return context.use(dataclasses.replace(now, seed=seed))
