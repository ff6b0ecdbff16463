"""Sampling: draws tokens from the model's distribution, with options for each row."""

from __future__ import annotations

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.greedy import end_logits, log_normalizer, only_allowed
from lingvo_gshard.decoding.selection import top_few

LOCAL_LETTERS = {"w": "the two words of a random key"}

# 2^32 over the golden ratio, so that rows with adjacent words share no random numbers.
_SPREAD = 0x9E3779B9
_HALVINGS = 33


def draw(logits_B1V: tf.Tensor, state: NestedMap, eos_id: int) -> NestedMap:
    """Returns a token for each row, and the log-probability that the model gives it.

    A draw depends on the row's `word_B`, `key_Bw` and `position_B` alone. The log-probability is
    the model's own, before temperature, penalties and limits.

    Args:
      logits_B1V: the model's logits.
      state: the state before the step.
      eos_id: id that ends a text.
    """
    is_end_V = tf.equal(tf.range(logits_B1V.shape[-1]), eos_id)
    end_B1 = end_logits(logits_B1V, state, eos_id)
    logits_BV = tf.where(is_end_V, end_B1, only_allowed(logits_B1V, state)[:, 0])
    if "seen_BV" in state:
        logits_BV = penalize_seen(logits_BV, state.seen_BV, state.repetition_B)
    token_B = take(
        logits_BV,
        state.temperature_B,
        state.top_k_B,
        state.top_p_B,
        state.min_p_B,
        uniform(logits_BV.shape[1], state.word_B, state.key_Bw, state.position_B),
    )
    own_B1 = tf.gather(logits_B1V[:, 0], token_B[:, None], batch_dims=1)
    log_probability_B1 = own_B1 - log_normalizer(logits_B1V)
    return NestedMap(token_BW=token_B[:, None], log_probability_BW=log_probability_B1)


def penalize_seen(logits_BV: tf.Tensor, seen_BV: tf.Tensor, penalty_B: tf.Tensor) -> tf.Tensor:
    """Returns logits that are lower for tokens that occurred.

    Keskar et al. 2019, arXiv 1909.05858, section 4.1.

    Args:
      logits_BV: logits.
      seen_BV: int32, not 0 for tokens in the text so far.
      penalty_B: positive logits are divided by it, and negative ones multiplied.
    """
    penalty_B1 = penalty_B[:, None]
    lower_BV = tf.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return tf.where(tf.not_equal(seen_BV, 0), lower_BV, logits_BV)


def uniform(size: int, word_B: tf.Tensor, key_Bw: tf.Tensor, position_B: tf.Tensor) -> tf.Tensor:
    """Returns float32 [B,V] uniform in (0, 1), a function of word, key and position of each row."""
    key_wB = random_numbers.hashed_fold_in_word(tf.transpose(key_Bw), position_B)
    spread_V = tf.cast(tf.range(size), tf.uint32) * tf.constant(_SPREAD, tf.uint32)
    values_BV = tf.bitcast(word_B, tf.uint32)[:, None] + spread_V[None, :]
    return random_numbers.hashed_uniform_of(values_BV, key_wB[..., None])


def take(
    logits_BV: tf.Tensor,
    temperature_B: tf.Tensor,
    top_k_B: tf.Tensor,
    top_p_B: tf.Tensor,
    min_p_B: tf.Tensor,
    uniform_BV: tf.Tensor,
) -> tf.Tensor:
    """Returns an int32 token for each row.

    With Gumbel noise added, the largest logit is distributed as the softmax (Gumbel 1954).

    Args:
      logits_BV: float32 logits.
      temperature_B: divides the logits; 0 takes the best token.
      top_k_B: draws from this many best tokens; 0: from all (Fan et al. 2018, arXiv 1805.04833).
      top_p_B: draws from the fewest tokens whose probabilities sum to this; 1: from all (Holtzman
        et al. 2019, arXiv 1904.09751).
      min_p_B: draws from tokens that are at least this much as likely as the best one; 0: from
        all (Nguyen et al. 2024, arXiv 2407.01082).
      uniform_BV: float32 random numbers in (0, 1).
    """
    is_drawn_B = temperature_B > 0
    logits_BV /= tf.where(is_drawn_B, temperature_B, 1.0)[:, None]
    most_B1 = tf.reduce_max(logits_BV, 1, keepdims=True)
    least_B1 = most_B1 + tf.math.log(min_p_B)[:, None]
    size = logits_BV.shape[1]
    count_B = tf.cast(tf.where(top_k_B > 0, tf.minimum(top_k_B, size), size), tf.float32)
    ones_BV = tf.ones_like(logits_BV)
    least_B1 = tf.maximum(least_B1, _threshold(logits_BV, ones_BV, count_B, count_B < size))
    mass_BV = tf.exp(logits_BV - most_B1)
    wanted_B = top_p_B * tf.reduce_sum(mass_BV, 1)
    least_B1 = tf.maximum(least_B1, _threshold(logits_BV, mass_BV, wanted_B, top_p_B < 1))
    noise_BV = tf.where(is_drawn_B[:, None], -tf.math.log(-tf.math.log(uniform_BV)), 0.0)
    noisy_BV = tf.where(logits_BV < least_B1, -float("inf"), logits_BV + noise_BV)
    return top_few(noisy_BV, 1)[1][:, 0]


def _threshold(
    logits_BV: tf.Tensor, weight_BV: tf.Tensor, wanted_B: tf.Tensor, is_limited_B: tf.Tensor
) -> tf.Tensor:
    """Returns [B,1]: the largest number such that the logits from it on have the wanted weight.

    It halves the interval of possible floats, which are ordered like integers. That takes a few
    vectorized passes over the logits, where sorting them takes milliseconds.

    Args:
      logits_BV: float32 logits.
      weight_BV: weight of each logit.
      wanted_B: the sum of weights to reach.
      is_limited_B: whether the row has a threshold; else it is minus infinity.
    """
    rows = logits_BV.shape[0]

    def search() -> tf.Tensor:
        ordered_BV = _flip_negative(tf.bitcast(logits_BV, tf.int32))

        def halve(step, low_B, high_B):
            # The mean, rounded up, without overflow.
            middle_B = tf.bitwise.bitwise_or(low_B, high_B) - tf.bitwise.right_shift(
                tf.bitwise.bitwise_xor(low_B, high_B), 1
            )
            reached = tf.where(ordered_BV >= middle_B[:, None], weight_BV, 0.0)
            is_enough_B = tf.reduce_sum(reached, 1) >= wanted_B
            low_B = tf.where(is_enough_B, middle_B, low_B)
            return step + 1, low_B, tf.where(is_enough_B, high_B, middle_B - 1)

        low_B, high_B = tf.reduce_min(ordered_BV, 1), tf.reduce_max(ordered_BV, 1)
        start = (tf.constant(0), low_B, high_B)
        _, low_B, _ = tf.while_loop(lambda step, *_: step < _HALVINGS, halve, start)
        least_B = tf.bitcast(_flip_negative(low_B), tf.float32)
        return tf.where(is_limited_B, least_B, -float("inf"))[:, None]

    unlimited = lambda: tf.fill([rows, 1], -float("inf"))  # noqa: E731
    return tf.cond(tf.reduce_any(is_limited_B), search, unlimited)


def _flip_negative(bits: tf.Tensor) -> tf.Tensor:
    """Maps the bits of floats to int32 in the order of the floats, and back again."""
    flip = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 31), tf.constant(0x7FFFFFFF))
    return tf.bitwise.bitwise_xor(bits, flip)
