"""Dropless dispatch: experts compute every token sent to them, without capacity or padding.

It follows MegaBlocks (Gale et al. 2022, arXiv 2211.15841). The rows of all groups are sorted by
expert, and each expert computes exactly its rows in blocks; see expert_blocks.py.

On a mesh this is a manual region. Each device sorts the rows of its groups by the device of their
expert and sends them there in one all-to-all. It computes the rows that arrive as a single device
would, and sends the outputs back in a second all-to-all.
"""

from __future__ import annotations

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe.dispatches.dispatch import Dispatch
from lingvo_gshard.layers.moe.dispatches.sorted_exchange import SortedExchange
from lingvo_gshard.layers.moe.dispatches.sorted_rows import SortedRows
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.routing import TokenChoiceRouting
from lingvo_gshard.sharding.manual import mesh_in_use
from lingvo_gshard.sharding.partitioning import current_partitioning

LOCAL_LETTERS = {"k": "choices of a token"}


class DroplessDispatch(Dispatch):
    """Sorts rows by expert. Each expert computes exactly the rows sent to it."""

    is_dropless = True
    is_vectorizable = False
    has_manual_regions = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "bound",
            0.0,
            "On a mesh, the rows that a device can send to another device, as a multiple of the "
            "number under balanced loads. Rows above it are dropped. 0: no bound, no dropped rows.",
            minimum=0,
        )
        return p

    def check_exchange(self, exchange: Params, path: str) -> None:
        """Raises ValueError if any option of the exchange is set; all options are for buffers."""
        for name, value in exchange.items():
            if value != exchange.default(name):
                raise UserError(
                    f"{path}.{name}={value!r} applies to capacity buffers, which {self.path} "
                    "(DroplessDispatch) does not have; reset it or choose another dispatch"
                )

    def run(
        self,
        routing: TokenChoiceRouting,
        x_GSM: tf.Tensor,
        experts: Experts,
        theta: NestedMap,
        exchange: Exchange,
    ) -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype.

        With a bound it reports the metric `over_bound_share`, the share of rows that were dropped.
        """
        assignments, num_experts = routing.assignments, routing.num_experts
        expert_kGS = tf.stack([tf.where(a.kept_GS, a.expert_GS, num_experts) for a in assignments])
        gate_kGS = tf.stack([a.gate_GS for a in assignments])
        over_bound = tf.constant(0.0)
        if current_partitioning() is None or mesh_in_use() is None:
            y_GSM = _run_on_one_device(x_GSM, expert_kGS, gate_kGS, experts, theta)
        else:
            region = SortedExchange.for_partitioning(experts, self.p.bound)
            y_GSM, over_bound = region.run(x_GSM, expert_kGS, gate_kGS, theta)
        if self.p.bound:
            rows = tf.reduce_sum(tf.cast(expert_kGS < num_experts, tf.float32))
            name = f"{context.layer_path()}/over_bound_share"
            context.current().add_metric(name, over_bound / tf.maximum(rows, 1.0), rows)
            if token_context.current().watched:
                context.current().add_sum(f"{context.layer_path()}/over_bound", over_bound)
        return y_GSM


def _run_on_one_device(
    x_GSM: tf.Tensor,
    expert_kGS: tf.Tensor,
    gate_kGS: tf.Tensor,
    experts: Experts,
    theta: NestedMap,
) -> tf.Tensor:
    choices, groups, size = expert_kGS.shape.as_list()
    expert_kT, gate_kT = (tf.reshape(x, [choices, groups * size]) for x in (expert_kGS, gate_kGS))
    x_TM = tf.reshape(x_GSM, [groups * size, x_GSM.shape[-1]])
    rows = SortedRows(expert_kT, experts.p.num_experts)
    return tf.reshape(rows.compute(x_TM, gate_kT, experts, theta), x_GSM.shape)
