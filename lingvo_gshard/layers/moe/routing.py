"""Routing: the small description every router returns and every dispatch understands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Choice:
    """One expert per token: which, the token's place in its buffer, and the weight of its output.

    All [G,S]: expert and position int32, gate float32 (0 where the token is not kept), kept bool,
    and wanted, float32, 1 where the token is to be computed if there is room.
    """

    expert_GS: tf.Tensor
    position_GS: tf.Tensor
    gate_GS: tf.Tensor
    kept_GS: tf.Tensor
    wanted_GS: tf.Tensor


@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """A loss of the router's own, a float32 scalar, and its factor in the training loss."""

    value: tf.Tensor
    weight: float


@dataclasses.dataclass(frozen=True)
class Routing:
    """The choices of every token, first choice first, with the size of the experts' buffers.

    losses and metrics: by name; metrics are float32 scalars.
    """

    choices: tuple[Choice, ...]
    num_experts: int
    capacity: int
    losses: dict[str, WeightedLoss] = dataclasses.field(default_factory=dict)
    metrics: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)

    def load(self) -> tf.Tensor:
        """Returns how many tokens each expert keeps, of all groups together, float32 [E]."""
        return self._by_expert([tf.cast(choice.kept_GS, tf.float32) for choice in self.choices])

    def gate_sums(self) -> tf.Tensor:
        """Returns the sum of the gates of the tokens that each expert keeps, float32 [E]."""
        return self._by_expert(
            [tf.where(choice.kept_GS, choice.gate_GS, 0.0) for choice in self.choices]
        )

    def _by_expert(self, values_GS: Sequence[tf.Tensor]) -> tf.Tensor:
        """The values, one of each choice, summed by expert."""
        return tf.add_n(
            [
                tf.einsum("GSE,GS->E", tf.one_hot(choice.expert_GS, self.num_experts), value_GS)
                for choice, value_GS in zip(self.choices, values_GS, strict=True)
            ]
        )

    def dropped_share(self, mask_GS: tf.Tensor) -> tf.Tensor:
        """Returns, of the places that tokens ask for, the share not given; float32 scalar."""
        del mask_GS
        wanted = tf.add_n([tf.reduce_sum(choice.wanted_GS) for choice in self.choices])
        kept = tf.add_n([tf.reduce_sum(tf.cast(c.kept_GS, tf.float32)) for c in self.choices])
        return 1.0 - kept / tf.maximum(wanted, 1.0)


@dataclasses.dataclass(frozen=True)
class SlotRouting:
    """The token in every slot of the experts' buffers, where experts choose tokens.

    token_of_slot_GEC: int32, S where the slot is empty; gate_of_slot_GEC: float32, 0 there. No
    expert holds a token twice. taken_GS: bool, whether any expert holds the token.
    """

    token_of_slot_GEC: tf.Tensor
    gate_of_slot_GEC: tf.Tensor
    taken_GS: tf.Tensor
    num_experts: int
    capacity: int
    losses: dict[str, WeightedLoss] = dataclasses.field(default_factory=dict)
    metrics: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)

    def load(self) -> tf.Tensor:
        """Returns how many tokens each expert holds, of all groups together, float32 [E]."""
        is_filled = tf.less(self.token_of_slot_GEC, self.taken_GS.shape[1])
        return tf.reduce_sum(tf.cast(is_filled, tf.float32), (0, 2))

    def gate_sums(self) -> tf.Tensor:
        """Returns the sum of the gates of the tokens that each expert holds, float32 [E]."""
        return tf.reduce_sum(self.gate_of_slot_GEC, (0, 2))

    def dropped_share(self, mask_GS: tf.Tensor) -> tf.Tensor:
        """Returns the share of real tokens that no expert holds, a float32 scalar."""
        taken = tf.reduce_sum(tf.cast(self.taken_GS, tf.float32) * mask_GS)
        return 1.0 - taken / tf.maximum(tf.reduce_sum(mask_GS), 1.0)


def expert_capacity(
    tokens: int, num_experts: int, factor: float, multiple: int = 1, at_least: int = 1
) -> int:
    """Returns C: tokens * factor / num_experts, rounded down, then up to `multiple`.

    Never more than the tokens and never less than `at_least`, both rounded up likewise: an expert
    takes a token at most once. With factor 2 and multiple 1 it is the paper's 2S/E (arXiv
    2006.16668, section 2.2); Lingvo rounds up to multiples of 4.
    """
    slots = min(max(int(tokens * factor / num_experts), at_least), tokens)
    return max(-(-slots // multiple) * multiple, multiple)
