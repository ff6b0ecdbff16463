"""Places: which of the tokens that picked an expert get into its buffer, and where."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gshard.layers.moe.routing import Choice
from lingvo_gshard.sharding import annotate

# Who comes first when a buffer fills: earlier tokens, or those whose first gate is larger.
PRIORITIES = ("position", "gate")


@dataclasses.dataclass(frozen=True)
class Pick:
    """One expert per token before there are places; all [G,S].

    expert int32, gate float32; wanted and counted are 1.0 or 0.0: whether the token is to be
    computed, and whether it takes a place all the same.
    """

    expert_GS: tf.Tensor
    gate_GS: tf.Tensor
    wanted_GS: tf.Tensor
    counted_GS: tf.Tensor


def place(
    picks: Sequence[Pick], num_experts: int, capacity: int, priority: str = "position"
) -> tuple[Choice, ...]:
    """Returns the picks with their places: the first ones in order of priority, then the second.

    Counts are integers below 2^24, which float32 holds exactly. Priority by gate is that of
    Riquelme et al. 2021 (arXiv 2106.05974, section 4), in each group.
    """
    order_GS = None
    if priority == "gate":
        first = picks[0]
        real_gate_GS = tf.where(first.wanted_GS > 0, first.gate_GS, -1.0)
        order_GS = tf.argsort(real_gate_GS, direction="DESCENDING", stable=True)
    choices, used_G1E = [], 0.0
    for pick in picks:
        chosen_GSE = annotate(tf.one_hot(pick.expert_GS, num_experts), "GSE")
        counted_GSE = chosen_GSE * pick.counted_GS[..., None]
        before_GSE = _counted_before(counted_GSE, order_GS) + used_G1E
        position_GS = tf.cast(tf.reduce_sum(before_GSE * chosen_GSE, -1), tf.int32)
        kept_GS = (position_GS < capacity) & (pick.wanted_GS > 0)
        gate_GS = tf.where(kept_GS, pick.gate_GS, 0.0)
        choices.append(Choice(pick.expert_GS, position_GS, gate_GS, kept_GS, pick.wanted_GS))
        used_G1E += tf.reduce_sum(counted_GSE, axis=1, keepdims=True)
    return tuple(choices)


def _counted_before(counted_GSE: tf.Tensor, order_GS: tf.Tensor | None) -> tf.Tensor:
    """How many tokens that come before each one are counted, for every expert."""
    if order_GS is None:
        return tf.cumsum(counted_GSE, axis=1, exclusive=True)
    in_order_GSE = tf.gather(counted_GSE, order_GS, batch_dims=1)
    before_GSE = tf.cumsum(in_order_GSE, axis=1, exclusive=True)
    return tf.gather(before_GSE, tf.argsort(order_GS), batch_dims=1)
