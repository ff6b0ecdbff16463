"""Sampling: draws tokens from the model's distribution, with options for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lingvo_gshard.core import NestedMap, known_sizes, random_numbers, tf
from lingvo_gshard.wings.inference.decoding.greedy import log_normalizer, only_allowed
from lingvo_gshard.wings.inference.decoding.selection import top_few
from lingvo_gshard.wings.inference.decoding.state import IMPOSSIBLE

LOCAL_LETTERS = {"e": "ids that end a text", "w": "the two words of a random key"}

# 2^32 over the golden ratio, so that rows with adjacent words share no random numbers.
_SPREAD = 0x9E3779B9
_HALVINGS = 33


def draw(logits_B1V: tf.Tensor, state: NestedMap, end_ids: Sequence[int]) -> NestedMap:
    """Returns a token for each row, and the log-probability that the model gives it.

    A draw depends on the row's `word_B`, `key_Bw` and `position_B` alone. The log-probability is
    the model's own, before temperature, penalties and limits.
    """
    is_end_Ve = tf.equal(tf.range(logits_B1V.shape[-1])[:, None], end_ids)
    is_early_B = state.generated_B + 1 < state.least_B
    is_barred_BV = is_early_B[:, None] & tf.reduce_any(is_end_Ve, 1)
    logits_BV = tf.where(is_barred_BV, IMPOSSIBLE, only_allowed(logits_B1V, state)[:, 0])
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
      seen_BV: int32, not 0 for tokens in the text so far.
      penalty_B: divides positive logits, and multiplies negative logits.
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
    `top_k_B`, `top_p_B` and `min_p_B` are as in `warp`.

    Args:
      logits_BV: float32 logits.
      temperature_B: divides the logits; 0 takes the best token.
      uniform_BV: float32 random numbers in (0, 1).
    """
    is_drawn_B = temperature_B > 0
    divisor_B = tf.where(is_drawn_B, temperature_B, 1.0)
    warped_BV = warp(logits_BV, divisor_B, top_k_B, top_p_B, min_p_B)
    noise_BV = tf.where(is_drawn_B[:, None], -tf.math.log(-tf.math.log(uniform_BV)), 0.0)
    return top_few(warped_BV + noise_BV, 1)[1][:, 0]


def warp(
    logits_BV: tf.Tensor,
    temperature_B: tf.Tensor,
    top_k_B: tf.Tensor,
    top_p_B: tf.Tensor,
    min_p_B: tf.Tensor,
) -> tf.Tensor:
    """Returns the logits to draw from, -inf for tokens that are not drawn.

    The restrictions apply in the order of transformers: each one sees the probabilities of the
    tokens that are left.

    Args:
      logits_BV: float32 logits.
      temperature_B: divides the logits.
      top_k_B: draws from this many best tokens, the first of equal ones; 0: from all (Fan et al.
        2018, arXiv 1805.04833).
      top_p_B: draws from the fewest of these tokens whose probabilities sum to this; 1: from all
        (Holtzman et al. 2019, arXiv 1904.09751).
      min_p_B: draws from tokens that are at least this much as likely as the best one; 0: from
        all (Nguyen et al. 2024, arXiv 2407.01082).
    """
    # Different logits may be equal after the division.
    given_BV, logits_BV = logits_BV, logits_BV / temperature_B[:, None]
    most_B1 = tf.reduce_max(logits_BV, 1, keepdims=True)
    size = known_sizes(logits_BV.shape)[1]
    count_B = tf.cast(tf.where(top_k_B > 0, tf.minimum(top_k_B, size), size), tf.float32)
    is_kept_BV = _fewest(given_BV, tf.ones_like(logits_BV), count_B, count_B < size)
    mass_BV = tf.where(is_kept_BV, tf.exp(logits_BV - most_B1), 0.0)
    wanted_B = top_p_B * tf.reduce_sum(mass_BV, 1)
    is_kept_BV &= _fewest(given_BV, mass_BV, wanted_B, top_p_B < 1)
    is_kept_BV &= ~(logits_BV < most_B1 + tf.math.log(min_p_B)[:, None])
    return tf.where(is_kept_BV, logits_BV, -float("inf"))


def _fewest(
    logits_BV: tf.Tensor, weight_BV: tf.Tensor, wanted_B: tf.Tensor, is_limited_B: tf.Tensor
) -> tf.Tensor:
    """Returns bool [B,V]: the fewest tokens, the best first, that have the wanted weight together.

    Of equal logits the first ones are taken, as in greedy decoding. The search for the least logit
    to take halves an interval of floats, whose bits are ordered like integers. This needs a few
    vectorized passes over the logits; sorting the logits would take milliseconds.
    """
    rows, size = known_sizes(logits_BV.shape)
    # -0.0 and 0.0 are equal but have different bits, so every zero becomes 0.0 first.
    ordered_BV = _flip_negative(tf.bitcast(tf.where(logits_BV == 0, 0.0, logits_BV), tf.int32))

    def weight_of(is_taken_BV: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.where(is_taken_BV, weight_BV, 0.0), 1)

    def search() -> tf.Tensor:
        least_B = _largest(
            lambda middle_B: weight_of(ordered_BV >= middle_B[:, None]) >= wanted_B,
            tf.reduce_min(ordered_BV, 1),
            tf.reduce_max(ordered_BV, 1),
            _HALVINGS,
        )
        is_tie_BV = tf.equal(ordered_BV, least_B[:, None])
        is_better_BV = ordered_BV > least_B[:, None]
        missing_B = wanted_B - weight_of(is_better_BV)

        def first_ties() -> tf.Tensor:
            # The tie at this index is the last that is needed.
            end_B = _largest(
                lambda end_B: weight_of(is_tie_BV & (tf.range(size) < end_B[:, None])) < missing_B,
                tf.zeros([rows], tf.int32),
                tf.fill([rows], size),
                size.bit_length(),
            )
            return is_tie_BV & (tf.range(size) <= end_B[:, None])

        ties_B = tf.reduce_sum(tf.cast(is_tie_BV, tf.int32), 1)
        has_ties = tf.reduce_any(is_limited_B & (ties_B > 1))
        is_taken_BV = is_better_BV | tf.cond(has_ties, first_ties, lambda: is_tie_BV)
        return is_taken_BV | ~is_limited_B[:, None]

    everything = lambda: tf.fill([rows, size], True)  # noqa: E731
    return tf.cond(tf.reduce_any(is_limited_B), search, everything)


def _largest(
    holds: Callable[[tf.Tensor], tf.Tensor], low_B: tf.Tensor, high_B: tf.Tensor, halvings: int
) -> tf.Tensor:
    """Returns the largest int32 [B] that a condition holds for.

    Args:
      holds: the condition, from int32 [B] to bool [B]. It holds from `low_B` up to some number, and
        for no larger number.
      low_B: the smallest numbers.
      high_B: the largest numbers.
      halvings: steps that halve the interval to a single number.
    """

    def halve(step, low_B, high_B):
        # The mean, rounded up, without overflow.
        middle_B = tf.bitwise.bitwise_or(low_B, high_B) - tf.bitwise.right_shift(
            tf.bitwise.bitwise_xor(low_B, high_B), 1
        )
        holds_B = holds(middle_B)
        low_B = tf.where(holds_B, middle_B, low_B)
        return step + 1, low_B, tf.where(holds_B, high_B, middle_B - 1)

    start = (tf.constant(0), low_B, high_B)
    _, low_B, _ = tf.while_loop(lambda step, *_: step < halvings, halve, start)
    return low_B


def _flip_negative(bits: tf.Tensor) -> tf.Tensor:
    """Maps the bits of floats to int32 in the order of the floats, and back again."""
    flip = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 31), tf.constant(0x7FFFFFFF))
    return tf.bitwise.bitwise_xor(bits, flip)
