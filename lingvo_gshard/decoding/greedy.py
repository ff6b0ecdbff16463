"""Greedy decoding: takes the best token at every step."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.decoding.selection import top_few
from lingvo_gshard.decoding.state import IMPOSSIBLE


def log_normalizer(logits: tf.Tensor) -> tf.Tensor:
    """Returns the log of the sum of exponentials over the last dimension.

    XLA for CPU copies what has more than two dimensions before it is reduced.
    """
    *shape, size = known_sizes(logits.shape)
    logits_RV = tf.reshape(logits, [-1, size])
    most_R1 = tf.reduce_max(logits_RV, -1, keepdims=True)
    sum_R = tf.reduce_sum(tf.exp(logits_RV - most_R1), -1)
    return tf.reshape(most_R1[:, 0] + tf.math.log(sum_R), shape)


def restrict(logits_BWV: tf.Tensor, state: NestedMap, eos_id: int) -> tf.Tensor:
    """Returns the logits with impossible values at tokens that a row must not choose.

    A row must not end before it has `least_B` tokens, and chooses among `allowed_BV` if that is
    in the state.

    Args:
      logits_BWV: the model's logits.
      state: the state before the step.
      eos_id: id that ends a text.
    """
    is_eos_V = tf.equal(tf.range(logits_BWV.shape[-1]), eos_id)
    is_early_B = state.generated_B + 1 < state.least_B
    is_barred_BV = is_early_B[:, None] & is_eos_V[None, :]
    if "allowed_BV" in state:
        is_barred_BV |= tf.equal(state.allowed_BV, 0)
    return tf.where(is_barred_BV[:, None, :], IMPOSSIBLE, logits_BWV)


def choose_best(logits_B1V: tf.Tensor, state: NestedMap, eos_id: int) -> NestedMap:
    """Returns the best token of each row, and the log-probability that the model gives it.

    Args:
      logits_B1V: the model's logits.
      state: the state before the step.
      eos_id: id that ends a text.
    """
    value_B1, token_B1 = top_few(restrict(logits_B1V, state, eos_id)[:, 0], 1)
    return NestedMap(token_BW=token_B1, log_probability_BW=value_B1 - log_normalizer(logits_B1V))
