"""Sums over the tokens of a routing, which watched routers report."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from lingvo_gshard.core import Layer, context, known_sizes, tf
from lingvo_gshard.layers import (
    BALANCE_LOSS,
    ExpertChoiceRouting,
    Groups,
    TokenChoiceRouting,
    load_metrics,
    token_context,
)

AnyRouting: TypeAlias = TokenChoiceRouting | ExpertChoiceRouting

LOCAL_LETTERS = {"c": "labels of tokens"}

# At most so many choices by part of the groups and by expert are counted.
_MOST_COUNTS = 4096


@dataclasses.dataclass(frozen=True)
class WatchedKinds:
    """Numbers of the kinds of tokens. A token's kind is its language * classes + its class."""

    languages: int
    classes: int

    def count(self, layer: Layer, routing: AnyRouting, mask_GS: tf.Tensor, groups: Groups) -> None:
        """Adds `watched_sums` to the context; see `TokenContext.on_routing`."""
        kinds = token_context.current().kinds
        kinds_GS = None if kinds is None else groups.split(kinds)
        for name, value in watched_sums(routing, mask_GS, kinds_GS, self, groups).items():
            context.current().add_sum(f"{layer.path}/{name}", value)


def watched_sums(
    routing: AnyRouting,
    mask_GS: tf.Tensor,
    kinds_GS: tf.Tensor | None,
    kinds: WatchedKinds,
    groups: Groups,
) -> dict[str, tf.Tensor]:
    """Returns float32 tensors that describe a routing and can be summed over micro-batches.

    choices        [E]: choices of each expert, before capacity
    kept           [E]: tokens that each expert computes
    tokens         [3]: real tokens, requests, and requests that are met (`Routing.requests`)
    batches        1
    groups         [3]: groups, their tokens with padding, and their capacity slots
    positions      [S]: requests by position in the experts' buffers, unless experts choose tokens
    by_part        [parts, E]: choices by equal parts of the groups, in the order of the rows
    entropy        sum over tokens of the entropy of their gates, if the router has gates over all E
    balance        the load-balancing loss, if the router has one
    by_language    [languages, E]: choices by the language of the token, if it is known
    by_class       [classes, E]: choices by the class of the token, if it is known

    Args:
      mask_GS: float32, 0 at padding.
      kinds_GS: int32, the kind of each token; None if it is unknown.
    """
    tokens = tf.reduce_sum(mask_GS)
    requests, met = routing.requests(mask_GS)
    asked_GSE = _asked(routing)
    sums = {
        "choices": tf.reduce_sum(asked_GSE, (0, 1)),
        "kept": routing.load(),
        "tokens": tf.stack([tokens, requests, met]),
        "batches": tf.ones([]),
        "groups": tf.constant(
            [1.0, groups.size, routing.num_experts * routing.capacity], tf.float32
        )
        * groups.count,
        "by_part": _by_part(groups.in_order(tf.reduce_sum(asked_GSE, 1))),
    }
    if isinstance(routing, TokenChoiceRouting):
        sums["positions"] = _by_position(routing)
    if load_metrics.ENTROPY in routing.metrics:
        sums["entropy"] = routing.metrics[load_metrics.ENTROPY] * tokens
    if BALANCE_LOSS in routing.losses:
        sums["balance"] = routing.losses[BALANCE_LOSS].value
    if kinds_GS is not None and kinds.languages:
        language_GS = kinds_GS // kinds.classes
        sums["by_language"] = _by_label(asked_GSE, language_GS, kinds.languages)
    if kinds_GS is not None:
        sums["by_class"] = _by_label(
            asked_GSE, tf.math.floormod(kinds_GS, kinds.classes), kinds.classes
        )
    return sums


def _asked(routing: AnyRouting) -> tf.Tensor:
    """Returns float32 [G,S,E]: 1 where a token asks for an expert, or where an expert chose it."""
    if isinstance(routing, TokenChoiceRouting):
        chosen = [(tf.one_hot(a.expert_GS, routing.num_experts), a) for a in routing.assignments]
        return tf.add_n(
            [one_hot_GSE * tf.expand_dims(a.wanted_GS, -1) for one_hot_GSE, a in chosen]
        )
    # Empty slots have the token S, which one_hot leaves out.
    tokens = known_sizes(routing.is_taken_GS.shape)[1]
    chosen_GES = tf.reduce_sum(tf.one_hot(routing.token_of_slot_GEC, tokens), 2)
    return tf.transpose(chosen_GES, (0, 2, 1))


def _by_label(asked_GSE: tf.Tensor, label_GS: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the choices of each expert by a label of the token, float32 [count,E]."""
    return tf.einsum("GSc,GSE->cE", tf.one_hot(label_GS, count), asked_GSE)


def _by_position(routing: TokenChoiceRouting) -> tf.Tensor:
    """Returns how many tokens ask for each position of the experts' buffers, float32 [S].

    Positions do not depend on the capacity: with capacity C, those from C on are dropped.
    """
    # An expert computes a token at most once, so that every position is below S.
    size = known_sizes(routing.assignments[0].position_GS.shape)[1]
    return tf.add_n(
        [
            tf.math.unsorted_segment_sum(a.wanted_GS, a.position_GS, size)
            for a in routing.assignments
        ]
    )


def _by_part(choices_GE: tf.Tensor) -> tf.Tensor:
    """Returns the sums over equal parts of the groups, as many parts as may be counted."""
    count, num_experts = known_sizes(choices_GE.shape)
    most = max(_MOST_COUNTS // num_experts, 1)
    parts = next(n for n in range(min(count, most), 0, -1) if count % n == 0)
    return tf.reduce_sum(tf.reshape(choices_GE, [parts, count // parts, num_experts]), 1)
