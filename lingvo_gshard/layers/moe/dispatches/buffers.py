"""Dispatch into buffers: an expert has C slots for the tokens of each group."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import exchange as exchanges
from lingvo_gshard.layers.moe.dispatches.dispatch import Dispatch
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts


class BufferDispatch(Dispatch):
    """Fills the buffers, has the experts compute all slots, and adds up what tokens get."""

    def run(
        self, x_GSM: tf.Tensor, experts: Experts, theta: NestedMap, exchange: Exchange
    ) -> tf.Tensor:
        """Returns [G,S,M]: each token's sum of its experts' outputs times gates, in its type."""
        with tf.name_scope(exchanges.DISPATCH_SCOPE):
            x_GECM = self.dispatch(x_GSM)
        y_GECM = exchange.run(x_GECM, lambda x_EGCM: experts.fprop(theta, x_EGCM))
        with tf.name_scope(exchanges.COMBINE_SCOPE):
            return self.combine(y_GECM)

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero."""
        raise NotImplementedError(f"{type(self).__name__} defines no dispatch")

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M]: each token's sum of expert outputs times gates."""
        raise NotImplementedError(f"{type(self).__name__} defines no combine")
