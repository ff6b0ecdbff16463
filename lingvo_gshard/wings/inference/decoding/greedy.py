"""Greedy decoding: takes the best token at every step."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core import NestedMap, known_sizes, tf
from lingvo_gshard.wings.inference.decoding.selection import top_few
from lingvo_gshard.wings.inference.decoding.state import IMPOSSIBLE

LOCAL_LETTERS = {"e": "ids that end a text"}


def log_normalizer(logits: tf.Tensor, most: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the log of the sum of exponentials over the last dimension.

    The logits are reduced as a matrix: XLA for CPU would first copy a tensor of more dimensions.

    Args:
      most: the largest logits, if they are known.
    """
    *shape, size = known_sizes(logits.shape)
    logits_RV = tf.reshape(logits, [-1, size])
    most_R = tf.reduce_max(logits_RV, -1) if most is None else tf.reshape(most, [-1])
    sum_R = tf.reduce_sum(tf.exp(logits_RV - most_R[:, None]), -1)
    return tf.reshape(most_R + tf.math.log(sum_R), shape)


def normalizer_of_choice(
    logits_BWV: tf.Tensor, value_BW: tf.Tensor, state: NestedMap, end_ids: Sequence[int]
) -> tf.Tensor:
    """Returns the `log_normalizer` of each hypothesis, [B,W], if its best token is known.

    `value_BW` is the largest logit that `only_allowed` leaves, `end_ids` excluded.
    """
    if "allowed_BV" in state:
        return log_normalizer(logits_BWV)
    most_BW = tf.reduce_max(_at(logits_BWV, end_ids), -1)
    return log_normalizer(logits_BWV, tf.maximum(value_BW, most_BW))


def only_allowed(logits_BWV: tf.Tensor, state: NestedMap) -> tf.Tensor:
    """Returns logits with impossible values at tokens that are not in `allowed_BV`, if given."""
    if "allowed_BV" not in state:
        return logits_BWV
    return tf.where(tf.equal(state.allowed_BV, 0)[:, None, :], IMPOSSIBLE, logits_BWV)


def end_logits(logits_BWV: tf.Tensor, state: NestedMap, end_ids: Sequence[int]) -> tf.Tensor:
    """Returns the logits [B,W,e] of the ends of a text.

    They are impossible in rows that would have fewer than `least_B` tokens, and where `allowed_BV`
    forbids them.
    """
    is_possible_Be = tf.fill([logits_BWV.shape[0], len(end_ids)], True)
    is_possible_Be &= state.generated_B[:, None] + 1 >= state.least_B[:, None]
    if "allowed_BV" in state:
        is_possible_Be &= tf.not_equal(_at(state.allowed_BV, end_ids), 0)
    return tf.where(is_possible_Be[:, None, :], _at(logits_BWV, end_ids), IMPOSSIBLE)


def choose_best(logits_B1V: tf.Tensor, state: NestedMap, end_ids: Sequence[int]) -> NestedMap:
    """Returns the best token of each row, and the log-probability that the model gives it."""
    value_B1, token_B1 = top_few(only_allowed(logits_B1V, state)[:, 0], 1, without=end_ids)
    end_value_B1, index_B1 = top_few(end_logits(logits_B1V, state, end_ids)[:, 0], 1)
    end_B1 = tf.gather(tf.constant(end_ids), index_B1)
    # Of equal logits the first one is taken.
    ends_B1 = end_value_B1 > value_B1
    ends_B1 |= tf.equal(end_value_B1, value_B1) & (end_B1 < token_B1)
    normalizer_B1 = normalizer_of_choice(logits_B1V, value_B1, state, end_ids)
    return NestedMap(
        token_BW=tf.where(ends_B1, end_B1, token_B1),
        log_probability_BW=tf.where(ends_B1, end_value_B1, value_B1) - normalizer_B1,
    )


def _at(x: tf.Tensor, ids: Sequence[int]) -> tf.Tensor:
    """Returns the values at a few ids of the last dimension."""
    return tf.stack([x[..., index] for index in ids], -1)
