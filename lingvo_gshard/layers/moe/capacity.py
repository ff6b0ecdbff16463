"""Capacity: assigns the slots of experts to the tokens that choose them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core import rounding
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers.moe.routing import Assignment
from lingvo_gshard.sharding import annotate

# Tokens that get the slots of a full expert: earlier ones, or those with a larger first gate.
PRIORITIES = ("position", "gate")
# The order of choices that get slots: all first choices before all second ones, as in Algorithm 1
# of arXiv 2006.16668, or all choices of a token before those of the tokens after it.
CHOICE, TOKEN = ORDERS = ("choice", "token")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One expert per token, before capacity is applied; every tensor is [G,S].

    Attributes:
      expert_GS: int32, the expert.
      gate_GS: float32, the weight of the expert's output.
      wanted_GS: 1.0 where the token requests the expert, 0.0 elsewhere.
      counted_GS: 1.0 where the token uses a capacity slot, even if not wanted; 0.0 elsewhere.
    """

    expert_GS: tf.Tensor
    gate_GS: tf.Tensor
    wanted_GS: tf.Tensor
    counted_GS: tf.Tensor


def expert_capacity(
    tokens: int, num_experts: int, factor: float, multiple: int = 1, at_least: int = 1
) -> int:
    """Returns C, the capacity slots of an expert: tokens * factor / num_experts, rounded down.

    With factor 2 and multiple 1 this is the paper's 2S/E (arXiv 2006.16668, section 2.2). Lingvo
    rounds up to multiples of 4.

    Args:
      tokens: size of S, the tokens of a group. It limits C, since an expert computes a token at
        most once.
      num_experts: size of E.
      factor: the average number of slots per token.
      multiple: C is rounded up to a multiple of this number.
      at_least: lower bound of C, before rounding up.
    """
    slots = min(max(rounding.floor(tokens * factor / num_experts), at_least), tokens)
    return max(-(-slots // multiple) * multiple, multiple)


def assign(
    choices: Sequence[Choice],
    num_experts: int,
    capacity: int,
    priority: str = "position",
    order: str = CHOICE,
) -> tuple[Assignment, ...]:
    """Assigns capacity slots to the choices of the tokens of each group.

    Counts are integers below 2^24, which float32 holds exactly. An expert with a slot for every
    token keeps all; XLA then computes positions only where they are used.

    Args:
      choices: the first choice of every token, then the second, and so on.
      num_experts: size of E.
      capacity: size of C.
      priority: which tokens come first in a choice. 'position': earlier tokens. 'gate': those with
        a larger first gate, in each group (Riquelme et al. 2021, arXiv 2106.05974, section 4).

      order: 'choice' assigns all first choices, then all second ones, and so on. A second choice
        then depends on the first choices of later tokens. 'token' assigns all choices of a token,
        then those of the next one, so that no token depends on a later one.

    Returns:
      One assignment for each choice.
    """
    order_GS = None
    if priority == "gate":
        first = choices[0]
        real_gate_GS = tf.where(first.wanted_GS > 0, first.gate_GS, -1.0)
        order_GS = tf.argsort(real_gate_GS, direction="DESCENDING", stable=True)
    chosen = [annotate(tf.one_hot(c.expert_GS, num_experts), "GSE") for c in choices]
    counted = [one * c.counted_GS[..., None] for one, c in zip(chosen, choices, strict=True)]
    # The slots that earlier choices have taken.
    taken = _count_before(tf.add_n(counted), order_GS) if order == TOKEN else 0.0
    assignments = []
    for choice, chosen_GSE, counted_GSE in zip(choices, chosen, counted, strict=True):
        before_GSE = taken if order == TOKEN else _count_before(counted_GSE, order_GS) + taken
        position_GS = tf.cast(tf.reduce_sum(before_GSE * chosen_GSE, -1), tf.int32)
        kept_GS = choice.wanted_GS > 0
        if capacity < choice.expert_GS.shape[1]:
            kept_GS &= position_GS < capacity
        gate_GS = tf.where(kept_GS, choice.gate_GS, 0.0)
        assignments.append(
            Assignment(choice.expert_GS, position_GS, gate_GS, kept_GS, choice.wanted_GS)
        )
        is_by_token = order == TOKEN
        taken += counted_GSE if is_by_token else tf.reduce_sum(counted_GSE, axis=1, keepdims=True)
    return tuple(assignments)


def _count_before(counted_GSE: tf.Tensor, order_GS: tf.Tensor | None) -> tf.Tensor:
    """Returns [G,S,E]: for each expert, the number of counted tokens before each token.

    Args:
      counted_GSE: 1 where the token takes a slot of the expert.
      order_GS: the tokens in order of priority; None for the order in the group.
    """
    if order_GS is None:
        return tf.cumsum(counted_GSE, axis=1, exclusive=True)
    in_order_GSE = tf.gather(counted_GSE, order_GS, batch_dims=1)
    before_GSE = tf.cumsum(in_order_GSE, axis=1, exclusive=True)
    return tf.gather(before_GSE, tf.argsort(order_GS), batch_dims=1)
