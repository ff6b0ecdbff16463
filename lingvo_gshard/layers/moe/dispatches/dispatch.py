"""The interface of all dispatches."""

from __future__ import annotations

from lingvo_gshard.core import Configurable, NestedMap, Params, UserError, names, tf
from lingvo_gshard.core.scopes import COMBINE_SCOPE, DISPATCH_SCOPE
from lingvo_gshard.layers import measured
from lingvo_gshard.layers.moe.dispatches.gathered import GatheredBuffers
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.groups import ordered_along
from lingvo_gshard.layers.moe.routing import Routing
from lingvo_gshard.sharding import annotate

# The exchanges of dispatches with buffers.
_EXCHANGES = ("fixed", "gathered")


class Dispatch(Configurable):
    """Sends each token to the experts of its routing and combines their outputs.

    A new dispatch is a subclass in its own file. It defines `run` and overrides the following
    if the default does not apply. It has no weights.

    Attributes:
      is_dropless: whether experts compute every token sent to them, so that they have no capacity.
      is_vectorizable: whether a pipeline (`wings/pipeline/vectorize.py`) can compute it for all of
        its stages as one operation. It cannot if the dispatch contains loops or a manual region.
      has_manual_regions: whether it computes in manual regions on a mesh.
    """

    is_dropless = False
    is_vectorizable = True
    has_manual_regions = False

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params)
        self.path = path

    def check_exchange(self, exchange: Params, path: str) -> None:
        """Raises ValueError if the dispatch cannot honor an option of the exchange."""

    def run(
        self,
        routing: Routing,
        x_GSM: tf.Tensor,
        experts: Experts,
        theta: NestedMap,
        exchange: Exchange,
    ) -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype."""
        raise NotImplementedError(f"{type(self).__name__} defines no run")


class Buffers:
    """The experts' buffers of one routing: fills them and reads them back.

    The last dimension may be U, rows of M for each part of the experts, in place of M.
    """

    def dispatch(self, x_GSM: tf.Tensor, row: str = "M") -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero.

        Args:
          row: letter of the last dimension, M or U.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no dispatch")

    def combine(self, y_GECM: tf.Tensor, row: str = "M") -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs.

        Args:
          row: letter of the last dimension, M or U.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no combine")


class BufferDispatch(Dispatch):
    """Fills the buffers, runs the experts on all slots, and combines the outputs.

    A subclass defines `buffers`.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "exchange",
            "",
            "How rows reach the devices of their experts: `fixed`, all-to-alls of the buffers, or "
            "`gathered`, tokens of all devices, from which each device fills the buffers of its "
            "experts; empty: `fixed`.",
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        if name := self.p.exchange:
            names.check(name, _EXCHANGES, f"{path}.exchange: {name!r}")

    def check_exchange(self, exchange: Params, path: str) -> None:
        """Raises UserError if an option is set that gathered tokens do not have."""
        if self.p.exchange != "gathered":
            return
        for name, value in exchange.items():
            if value != exchange.default(name):
                raise UserError(
                    f"{path}.{name}={value!r} applies to buffers that are sent, but "
                    f"{self.path}.exchange is 'gathered'; reset {path}.{name}, or set "
                    f"{self.path}.exchange to 'fixed'"
                )

    def buffers(self, routing: Routing, dtype: tf.DType) -> Buffers:
        """Returns the buffers of a routing for activations of type `dtype`."""
        raise NotImplementedError(f"{type(self).__name__} defines no buffers")

    def run(
        self,
        routing: Routing,
        x_GSM: tf.Tensor,
        experts: Experts,
        theta: NestedMap,
        exchange: Exchange,
    ) -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype.

        Where H is split, each device along the axes of H computes a part of every expert, and the
        outputs of the parts must be added. They are added for each token, after `combine`. Adding
        them for each capacity slot would move more, since a token has a slot for each of its
        experts. The gradients with respect to the experts' inputs are also added for each token. If
        the exchange rounds rows, the parts are added before the exchange.
        """
        gathered = None
        if self.p.exchange == "gathered":
            gathered = GatheredBuffers.for_partitioning(routing.num_experts)
            with tf.name_scope(DISPATCH_SCOPE):
                routing, x_GSM = gathered.gather_routing(routing), gathered.gather(x_GSM)
        buffers = self.buffers(routing, x_GSM.dtype)
        # Experts of another class need no parts.
        parts = 1 if exchange.rounds else getattr(experts, "parts", 1)
        row = "U" if parts > 1 else "M"
        with tf.name_scope(DISPATCH_SCOPE):
            x_GECM = buffers.dispatch(_for_parts(x_GSM, parts), row)

        by_chunk = iter(measured.for_parts(experts, theta, exchange.p.chunks))

        def compute(x_EGCM: tf.Tensor) -> tf.Tensor:
            with ordered_along("EGCM".index("G")):
                return experts.fprop(next(by_chunk), x_EGCM)

        y_GECM = (gathered or exchange).run(x_GECM, compute, row)
        with tf.name_scope(COMBINE_SCOPE):
            y_GSM = _sum_parts(buffers.combine(y_GECM, row), parts)
            return gathered.scatter(y_GSM) if gathered else y_GSM


def _for_parts(x_GSM: tf.Tensor, parts: int) -> tf.Tensor:
    """Returns [G,S,U]: the rows of tokens, once for each part of the experts."""
    if parts == 1:
        return x_GSM
    groups, size, model_dim = x_GSM.shape.as_list()
    x_GSUM = tf.broadcast_to(x_GSM[:, :, tf.newaxis], [groups, size, parts, model_dim])
    x_GSUM = annotate(x_GSUM, "GSUM")
    return annotate(tf.reshape(x_GSUM, [groups, size, parts * model_dim]), "GSU")


def _sum_parts(y_GSU: tf.Tensor, parts: int) -> tf.Tensor:
    """Returns [G,S,M]: the sums over the parts."""
    if parts == 1:
        return y_GSU
    groups, size, row = y_GSU.shape.as_list()
    y_GSUM = annotate(tf.reshape(y_GSU, [groups, size, parts, row // parts]), "GSUM")
    return annotate(tf.reduce_sum(y_GSUM, 2), "GSM")
