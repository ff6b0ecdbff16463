"""Dispatch into buffers: each expert has C capacity slots for the tokens of each group."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import exchange as exchanges
from lingvo_gshard.layers.moe.dispatches.dispatch import Dispatch
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.groups import ordered_along
from lingvo_gshard.layers.moe.routing import Routing


class Buffers:
    """The experts' buffers of one routing: fills them and reads them back."""

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero."""
        raise NotImplementedError(f"{type(self).__name__} defines no dispatch")

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs."""
        raise NotImplementedError(f"{type(self).__name__} defines no combine")


class BufferDispatch(Dispatch):
    """Fills the buffers, runs the experts on all slots, and combines the outputs.

    A subclass defines `buffers`.
    """

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
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype."""
        buffers = self.buffers(routing, x_GSM.dtype)
        with tf.name_scope(exchanges.DISPATCH_SCOPE):
            x_GECM = buffers.dispatch(x_GSM)

        def compute(x_EGCM: tf.Tensor) -> tf.Tensor:
            with ordered_along("EGCM".index("G")):
                return experts.fprop(theta, x_EGCM)

        y_GECM = exchange.run(x_GECM, compute)
        with tf.name_scope(exchanges.COMBINE_SCOPE):
            return buffers.combine(y_GECM)
