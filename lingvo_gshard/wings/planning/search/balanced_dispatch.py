"""BalancedDispatch: stands for a dropless dispatch while a model is traced for the cost model."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import NestedMap, Params, known_sizes, tf
from lingvo_gshard.layers import Exchange, Experts, GatherDispatch, TokenChoiceRouting


class BalancedDispatch(GatherDispatch):
    """Fills each expert's buffer with its rows under balanced loads.

    A dropless dispatch computes its rows in kernels or in loops, whose products have no letters.
    This one has the same products and the same rows, as einsums with the letters of experts.
    """

    is_dropless = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("bound", 0.0, "As in the dispatch that this one stands for.")
        p.define("rows_exchange", "", "The exchange of the dispatch that this one stands for.")
        return p

    def run(
        self,
        routing: TokenChoiceRouting,
        x_GSM: tf.Tensor,
        experts: Experts,
        theta: NestedMap,
        exchange: Exchange,
    ) -> tf.Tensor:
        """Returns [G,S,M], as `Dispatch.run`, for experts with equally many rows."""
        rows = known_sizes(x_GSM.shape)[1] * len(routing.assignments)
        even = dataclasses.replace(routing, capacity=-(-rows // routing.num_experts))
        return super().run(even, x_GSM, experts, theta, exchange)
