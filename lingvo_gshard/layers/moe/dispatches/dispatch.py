"""Dispatch: the interface of all ways to bring tokens to experts and their outputs back."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.routing import Routing, SlotRouting


class Dispatch:
    """Computes experts on the tokens of one routing.

    takes_all: whether experts take all tokens that come, so that nothing limits them.
    """

    takes_all = False

    def __init__(self, routing: Routing | SlotRouting, dtype: tf.DType):
        self._routing, self._dtype = routing, dtype

    @classmethod
    def check(cls, params: Params, path: str) -> None:
        """Raises ValueError if an option of the layer's Params is for other dispatches."""
        if params.dropless_bound:
            raise ValueError(
                f"{path}.dropless_bound={params.dropless_bound:g} is for dispatch='dropless', not "
                f"for {path}.dispatch={params.dispatch!r}"
            )

    def run(
        self, x_GSM: tf.Tensor, experts: Experts, theta: NestedMap, exchange: Exchange
    ) -> tf.Tensor:
        """Returns [G,S,M]: each token's sum of its experts' outputs times gates, in its type.

        theta: the experts' weights. exchange: how rows travel between devices.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no run")
