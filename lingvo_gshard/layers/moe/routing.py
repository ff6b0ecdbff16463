"""Routings: the assignments of tokens to experts, which routers return and dispatches apply."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core import known_sizes, random_numbers
from lingvo_gshard.core.lazy import gen_xla_ops, tf
from lingvo_gshard.sharding import annotate


@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """An auxiliary loss of a router.

    Attributes:
      value: float32 scalar.
      weight: its factor in the training loss.
      count: number of tokens or groups that the value is a mean over, a float32 scalar. None: all
        tokens that are no padding. `Layer.add_loss` says what it is for.
    """

    value: tf.Tensor
    weight: float
    count: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Assignment:
    """One expert per token, after capacity is applied; every tensor is [G,S].

    Attributes:
      expert_GS: int32, the expert.
      position_GS: int32, the token's position in the expert's buffer.
      gate_GS: float32, the weight of the expert's output; 0 where the token is not kept.
      kept_GS: bool, whether the token got a capacity slot.
      wanted_GS: float32, 1 where the token asked for the expert and 0 elsewhere.
    """

    expert_GS: tf.Tensor
    position_GS: tf.Tensor
    gate_GS: tf.Tensor
    kept_GS: tf.Tensor
    wanted_GS: tf.Tensor


class Routing:
    """The experts of each token and their weights: the base class of both kinds of routing.

    Attributes:
      capacity: size of C, the capacity slots that an expert has for each group.
      losses: auxiliary losses by name.
      metrics: float32 scalars by name.
    """

    num_experts: int
    capacity: int
    losses: dict[str, WeightedLoss]
    metrics: dict[str, tf.Tensor]

    def load(self) -> tf.Tensor:
        """Returns the number of tokens that each expert keeps over all groups, float32 [E]."""
        raise NotImplementedError

    def gate_sums(self) -> tf.Tensor:
        """Returns the sum of the gates of the tokens that each expert keeps, float32 [E]."""
        raise NotImplementedError

    def token_gates(self) -> tf.Tensor:
        """Returns the gate of each expert for each token, float32 [G,S,E]; 0 for those not used."""
        raise NotImplementedError

    def requests(self, mask_GS: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns how many requests there are, and how many are met; float32 scalars.

        A request is a token's choice of an expert, or a token that waits to be chosen.

        Args:
          mask_GS: float32, 0 at padding.
        """
        raise NotImplementedError

    def dropped_share(self, mask_GS: tf.Tensor) -> tf.Tensor:
        """Returns the share of the requests that are not met, a float32 scalar, without padding."""
        requests, met = self.requests(mask_GS)
        return 1.0 - met / tf.maximum(requests, 1.0)


@dataclasses.dataclass(frozen=True)
class TokenChoiceRouting(Routing):
    """The experts that each token has chosen.

    Attributes:
      assignments: one for each choice of a token, all first choices first.
    """

    assignments: tuple[Assignment, ...]
    num_experts: int
    capacity: int
    losses: dict[str, WeightedLoss] = dataclasses.field(default_factory=dict)
    metrics: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)

    def load(self) -> tf.Tensor:
        kept = [tf.cast(a.kept_GS, tf.float32) for a in self.assignments]
        return tf.reduce_sum(self._by_expert(kept), (0, 1))

    def gate_sums(self) -> tf.Tensor:
        return tf.reduce_sum(self.token_gates(), (0, 1))

    def token_gates(self) -> tf.Tensor:
        return self._by_expert([tf.where(a.kept_GS, a.gate_GS, 0.0) for a in self.assignments])

    def _by_expert(self, values_GS: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns [G,S,E]: each token's values at its experts, 0 elsewhere.

        Args:
          values_GS: one tensor for each assignment.
        """
        return tf.add_n(
            [
                tf.one_hot(a.expert_GS, self.num_experts) * value_GS[..., None]
                for a, value_GS in zip(self.assignments, values_GS, strict=True)
            ]
        )

    def requests(self, mask_GS: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the number of requested capacity slots, and how many were free."""
        del mask_GS
        wanted_GS = tf.add_n([a.wanted_GS for a in self.assignments])
        return tf.reduce_sum(wanted_GS), tf.reduce_sum(self.load())


@dataclasses.dataclass(frozen=True)
class ExpertChoiceRouting(Routing):
    """The tokens that each expert has chosen. No expert chooses a token twice.

    Attributes:
      token_of_slot_GEC: int32, the token in each capacity slot; S where the slot is empty.
      gate_of_slot_GEC: float32, the token's gate; 0 where the slot is empty.
      is_taken_GS: bool, whether any expert chose the token.
    """

    token_of_slot_GEC: tf.Tensor
    gate_of_slot_GEC: tf.Tensor
    is_taken_GS: tf.Tensor
    num_experts: int
    capacity: int
    losses: dict[str, WeightedLoss] = dataclasses.field(default_factory=dict)
    metrics: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)

    def load(self) -> tf.Tensor:
        is_filled = tf.less(self.token_of_slot_GEC, known_sizes(self.is_taken_GS.shape)[1])
        return tf.reduce_sum(tf.cast(is_filled, tf.float32), (0, 2))

    def gate_sums(self) -> tf.Tensor:
        return tf.reduce_sum(self.gate_of_slot_GEC, (0, 2))

    def token_gates(self) -> tf.Tensor:
        # Empty slots have the token S, which one_hot leaves out.
        chosen_GECS = tf.one_hot(self.token_of_slot_GEC, self.is_taken_GS.shape[1])
        return tf.einsum("GECS,GEC->GSE", chosen_GECS, self.gate_of_slot_GEC)

    def requests(self, mask_GS: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the number of real tokens, and how many of them an expert chose."""
        taken = tf.reduce_sum(tf.cast(self.is_taken_GS, tf.float32) * mask_GS)
        return tf.reduce_sum(mask_GS), taken


# A full expert keeps earlier tokens, or tokens with a larger first gate.
PRIORITIES = ("position", "gate")
# The order of choices in getting slots. CHOICE: all first choices before all second choices, as in
# Algorithm 1 of arXiv 2006.16668. TOKEN: all choices of a token before all choices of later tokens.
CHOICE, TOKEN = ORDERS = ("choice", "token")
# Up to this many rows are sorted by comparing all pairs, which is faster than XLA's sort.
_COMPARED_ROWS = 1024


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
      factor: the average number of slots per token.
      multiple: C is rounded up to a multiple of this number.
      at_least: lower bound of C, before rounding up.
    """
    slots = min(max(random_numbers.floor(tokens * factor / num_experts), at_least), tokens)
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
      priority: the tokens that come first in a choice. 'position': earlier tokens. 'gate': tokens
        with a larger first gate, in each group (Riquelme et al. 2021, arXiv 2106.05974, section 4).
      order: 'choice' assigns all first choices, then all second choices, and so on. A second choice
        then depends on the first choices of later tokens. 'token' assigns all choices of a token,
        then all choices of the next token, so that no token depends on later tokens.

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


def count_rows(expert: tf.Tensor, num_experts: int) -> tf.Tensor:
    """Returns int32 [E]: the number of rows of each expert.

    Args:
      expert: int32, the expert of each row, in any shape; num_experts or more where there is none.
    """
    chosen = tf.one_hot(expert, num_experts)
    # XLA sums float32 faster than int32.
    return tf.cast(tf.reduce_sum(chosen, list(range(expert.shape.rank))), tf.int32)


def sort_rows(expert_r: tf.Tensor, num_experts: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the int32 rows in order of their experts, and the position of each in that order.

    Rows of one expert keep their order. Rows without an expert are last.

    Args:
      expert_r: int32, the expert of each row; num_experts or more where there is none.
    """
    (rows,) = expert_r.shape
    index_r = tf.range(rows)
    if rows > _COMPARED_ROWS:
        # One array, which holds the expert and the row. XLA sorts it faster than an array of
        # experts and one of rows, and libtpu 0.0.42 rejects some programs on a mesh with the top-k
        # of tf.argsort.
        key = tf.int32 if (num_experts + 1) * rows <= tf.int32.max else tf.int64
        expert_r = tf.cast(tf.minimum(expert_r, num_experts), key)
        sorted_r = gen_xla_ops.xla_sort(expert_r * rows + tf.cast(index_r, key))
        order_r = tf.cast(sorted_r % rows, tf.int32)
        return order_r, tf.scatter_nd(order_r[:, None], index_r, [rows])
    one, other = expert_r[:, None], expert_r[None, :]
    is_before = (other < one) | (tf.equal(other, one) & (index_r[None, :] < index_r[:, None]))
    position_r = tf.reduce_sum(tf.cast(is_before, tf.int32), 1)
    is_at = tf.equal(position_r[None, :], index_r[:, None])
    order_r = tf.reduce_sum(tf.where(is_at, index_r[None, :], 0), 1)
    return order_r, position_r


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
