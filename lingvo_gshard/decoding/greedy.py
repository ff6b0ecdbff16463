"""Greedy decoding: takes the best token at every step."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.decoding.selection import top_few
from lingvo_gshard.decoding.state import IMPOSSIBLE


def log_normalizer(logits: tf.Tensor, most: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the log of the sum of exponentials over the last dimension.

    XLA for CPU copies what has more than two dimensions before it is reduced.

    Args:
      logits: the logits.
      most: the largest logits, if they are known.
    """
    *shape, size = known_sizes(logits.shape)
    logits_RV = tf.reshape(logits, [-1, size])
    most_R = tf.reduce_max(logits_RV, -1) if most is None else tf.reshape(most, [-1])
    sum_R = tf.reduce_sum(tf.exp(logits_RV - most_R[:, None]), -1)
    return tf.reshape(most_R + tf.math.log(sum_R), shape)


def normalizer_of_choice(
    logits_BWV: tf.Tensor, value_BW: tf.Tensor, state: NestedMap, eos_id: int
) -> tf.Tensor:
    """Returns `log_normalizer` of logits [B,W] whose best tokens are known.

    Args:
      logits_BWV: the model's logits.
      value_BW: the largest logits of `only_allowed` besides that of the end.
      state: the state before the step.
      eos_id: id that ends a text.
    """
    if "allowed_BV" in state:
        return log_normalizer(logits_BWV)
    return log_normalizer(logits_BWV, tf.maximum(value_BW, logits_BWV[..., eos_id]))


def only_allowed(logits_BWV: tf.Tensor, state: NestedMap) -> tf.Tensor:
    """Returns logits with impossible values at tokens that are not in `allowed_BV`.

    They are returned as they are if that is not in the state.
    """
    if "allowed_BV" not in state:
        return logits_BWV
    return tf.where(tf.equal(state.allowed_BV, 0)[:, None, :], IMPOSSIBLE, logits_BWV)


def end_logits(logits_BWV: tf.Tensor, state: NestedMap, eos_id: int) -> tf.Tensor:
    """Returns the logits [B,W] of the end of a text.

    They are impossible in rows that would have fewer than `least_B` tokens.
    """
    is_early_B = state.generated_B + 1 < state.least_B
    return tf.where(is_early_B[:, None], IMPOSSIBLE, logits_BWV[..., eos_id])


def choose_best(logits_B1V: tf.Tensor, state: NestedMap, eos_id: int) -> NestedMap:
    """Returns the best token of each row, and the log-probability that the model gives it.

    Args:
      logits_B1V: the model's logits.
      state: the state before the step.
      eos_id: id that ends a text.
    """
    value_B1, token_B1 = top_few(only_allowed(logits_B1V, state)[:, 0], 1, without=eos_id)
    end_B1 = end_logits(logits_B1V, state, eos_id)
    # Of equal logits the first one is taken.
    ends_B1 = (end_B1 > value_B1) | (tf.equal(end_B1, value_B1) & (eos_id < token_B1))
    normalizer_B1 = normalizer_of_choice(logits_B1V, value_B1, state, eos_id)
    return NestedMap(
        token_BW=tf.where(ends_B1, eos_id, token_B1),
        log_probability_BW=tf.where(ends_B1, end_B1, value_B1) - normalizer_B1,
    )
