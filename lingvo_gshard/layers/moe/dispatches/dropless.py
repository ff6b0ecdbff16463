"""Dropless dispatch: experts compute all tokens that come, and work is as much as there are tokens.

MegaBlocks (Gale et al. 2022, arXiv 2211.15841). There are no buffers with room for so many tokens:
rows are sorted by expert, and every expert computes those it has, see blocks.py.

On a mesh it is a manual region: each device sorts the rows of its groups by the device that has
their expert, sends them there by one all-to-all, computes its experts' rows as on one device, and
sends them back by another.
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.dispatches.dispatch import Dispatch
from lingvo_gshard.layers.moe.dispatches.sorted_exchange import SortedExchange
from lingvo_gshard.layers.moe.dispatches.sorted_rows import SortedRows
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.routing import Routing
from lingvo_gshard.sharding.manual import mesh_in_use
from lingvo_gshard.sharding.partitioning import current_partitioning


class DroplessDispatch(Dispatch):
    """Rows sorted by expert, of which experts compute as many as they have.

    bound: on a mesh, the rows that a device can send to another, times their number where all
    experts' loads are even; those beyond are dropped. 0: as many as it has.
    """

    takes_all = True

    def __init__(self, routing: Routing, dtype: tf.DType, bound: float = 0.0):
        super().__init__(routing, dtype)
        self._bound = bound

    @classmethod
    def check(cls, params: Params, path: str) -> None:
        """Raises ValueError for a negative bound and for options of the exchange of buffers."""
        if params.dropless_bound < 0:
            raise ValueError(
                f"{path}.dropless_bound: {params.dropless_bound:g}; 0 or more was expected"
            )
        exchange = params.exchange
        for name, value in exchange.items():
            if value != exchange.default(name):
                raise ValueError(
                    f"{path}.exchange.{name}={value!r} is for buffers, and {path}.dispatch="
                    "'dropless' has none; leave the one as it is or choose another dispatch"
                )

    def run(
        self, x_GSM: tf.Tensor, experts: Experts, theta: NestedMap, exchange: Exchange
    ) -> tf.Tensor:
        """Returns [G,S,M]: each token's sum of its experts' outputs times gates, in its type.

        With a bound there is a metric: over_bound_share, of the rows those that it dropped.
        """
        choices, num_experts = self._routing.choices, self._routing.num_experts
        expert_KGS = tf.stack([tf.where(c.kept_GS, c.expert_GS, num_experts) for c in choices])
        gate_KGS = tf.stack([choice.gate_GS for choice in choices])
        over = tf.constant(0.0)
        if current_partitioning() is None or mesh_in_use() is None:
            y_GSM = _on_one_device(x_GSM, expert_KGS, gate_KGS, experts, theta)
        else:
            region = SortedExchange.of(experts, self._bound)
            y_GSM, over = region.run(x_GSM, expert_KGS, gate_KGS, theta)
        if self._bound:
            rows = tf.reduce_sum(tf.cast(expert_KGS < num_experts, tf.float32))
            name = f"{context.layer_path()}/over_bound_share"
            context.current().add_metric(name, over / tf.maximum(rows, 1.0))
        return y_GSM


def _on_one_device(
    x_GSM: tf.Tensor,
    expert_KGS: tf.Tensor,
    gate_KGS: tf.Tensor,
    experts: Experts,
    theta: NestedMap,
) -> tf.Tensor:
    choices, groups, size = expert_KGS.shape.as_list()
    expert_KT, gate_KT = (tf.reshape(x, [choices, groups * size]) for x in (expert_KGS, gate_KGS))
    x_TM = tf.reshape(x_GSM, [groups * size, x_GSM.shape[-1]])
    rows = SortedRows(expert_KT, experts.p.num_experts)
    return tf.reshape(rows.compute(x_TM, gate_KT, experts, theta), x_GSM.shape)
