"""Beam search with length normalization, ended hypotheses kept aside, and exact stopping.

A step scores every pair of a hypothesis and a next token. If a pair among the W best has an id that
ends a text, the hypothesis has ended and leaves the beam. The W best pairs with other tokens make
the new beam. Ended hypotheses are ranked by

    (log probability) / ((5 + length) / 6) ** length_exponent + coverage_weight * coverage

(Wu et al. 2016, arXiv 1609.08144, equation 14). Coverage is the sum over source positions of the
log of min(1, attention received). A search stops when no continuation of a hypothesis in the beam
can rank above the ended hypotheses that are to be returned. This is certain because log
probabilities only decrease, and coverage is 0 at best.
"""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core import NestedMap, tf
from lingvo_gshard.wings.inference.decoding.greedy import (
    end_logits,
    normalizer_of_choice,
    only_allowed,
)
from lingvo_gshard.wings.inference.decoding.selection import top_few
from lingvo_gshard.wings.inference.decoding.state import IMPOSSIBLE

LOCAL_LETTERS = {"c": "candidates for a beam", "e": "ids that end a text"}

# Less attention than this counts as this much, so that the logarithm is finite.
_NO_ATTENTION = 1e-6


def length_penalty(length_B: tf.Tensor, exponent_B: tf.Tensor) -> tf.Tensor:
    """Returns the divisor, float32 [B], of log probabilities of texts with this many tokens."""
    return ((5.0 + tf.cast(length_B, tf.float32)) / 6.0) ** exponent_B


def extend_beam(logits_BWV: tf.Tensor, state: NestedMap, end_ids: Sequence[int]) -> NestedMap:
    """Returns the next beam and the hypotheses that end.

    Args:
      logits_BWV: the model's logits after each hypothesis.
      state: the state before the step, with coverage that includes the step's attention.
      end_ids: ids that end a text, ascending.

    Returns:
      token_BW, parent_BW: int32; the hypotheses of the new beam, best first.
      log_probability_BW: of the tokens.
      score_BW: log probabilities of the hypotheses.
      end_BWe: the rank of hypothesis w of the old beam if it ends now with id e, else IMPOSSIBLE.
      end_log_probability_BWe: the log probability of that end.
      last_BW: the rank of the new hypotheses if their length is the limit, else IMPOSSIBLE.
      ended_BW: the ranks of the best W hypotheses that have ended so far, best first.
      is_done_B: whether the search of a row is complete.
    """
    batch, beam, _ = logits_BWV.shape
    candidates, normalizer_BW = _best_tokens(logits_BWV, state, end_ids)
    score_BW, token_BW, parent_BW, gain_BW = candidates

    end_gain_BWe = end_logits(logits_BWV, state, end_ids) - normalizer_BW[..., None]
    end_score_BWe = state.score_BW[..., None] + end_gain_BWe
    length_B = state.generated_B + 1
    penalty_B1 = length_penalty(length_B, state.length_exponent_B)[:, None]
    coverage_BW = _coverage_term(state)
    end_BWe = end_score_BWe / penalty_B1[..., None] + coverage_BW[..., None]
    end_BWe = tf.where(_is_among_best(end_score_BWe, score_BW, beam), end_BWe, IMPOSSIBLE)
    is_last_B = length_B >= state.limit_B
    last_BW = score_BW / penalty_B1 + tf.gather(coverage_BW, parent_BW, batch_dims=1)
    last_BW = tf.where(is_last_B[:, None] & _exists(score_BW), last_BW, IMPOSSIBLE)
    end_Bc = tf.reshape(end_BWe, [batch, beam * len(end_ids)])
    ended_Bc = tf.concat([state.ended_BW, end_Bc, last_BW], 1)
    ended_BW, _ = top_few(ended_Bc, beam)
    ended_BW = tf.maximum(ended_BW, IMPOSSIBLE)

    # A rank changes in one direction as lengths grow, so one of both ends is the best possible.
    soonest_B = length_penalty(length_B + 1, state.length_exponent_B)
    latest_B = length_penalty(state.limit_B, state.length_exponent_B)
    best_B = score_BW[:, 0] / tf.maximum(soonest_B, latest_B)
    # A sum, because XLA's partitioner would collect the rows of all devices for a gather.
    is_last_wanted_BW = tf.equal(tf.range(1, beam + 1), state.wanted_B[:, None])
    threshold_B = tf.reduce_sum(tf.where(is_last_wanted_BW, ended_BW, 0.0), 1)
    return NestedMap(
        token_BW=token_BW,
        parent_BW=parent_BW,
        log_probability_BW=gain_BW,
        score_BW=score_BW,
        end_BWe=end_BWe,
        end_log_probability_BWe=end_gain_BWe,
        last_BW=last_BW,
        ended_BW=ended_BW,
        is_done_B=is_last_B | (threshold_B >= best_B) | ~_exists(score_BW[:, 0]),
    )


def add_coverage(state: NestedMap, weights_BNWK: tf.Tensor) -> tf.Tensor:
    """Returns coverage_BWK with the step's attention, the mean over the heads of the last layer."""
    return state.coverage_BWK + tf.reduce_mean(weights_BNWK, 1)


def _best_tokens(
    logits_BWV: tf.Tensor, state: NestedMap, end_ids: Sequence[int]
) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns the best W tokens after all hypotheses, and the logits' normalizers [B,W].

    The tokens are scores, ids, parents and log probabilities, each [B,W]. The ends of a text are
    not among them.
    """
    batch, beam, size = logits_BWV.shape
    allowed_RV = tf.reshape(only_allowed(logits_BWV, state), [batch * beam, size])
    value, token = top_few(allowed_RV, beam, without=end_ids)
    value_BWc = tf.reshape(value, [batch, beam, beam])
    normalizer_BW = normalizer_of_choice(logits_BWV, value_BWc[..., 0], state, end_ids)
    gain_BWc = value_BWc - normalizer_BW[..., None]
    gain_BWc = tf.maximum(gain_BWc, IMPOSSIBLE)
    flat = [batch, beam * beam]
    score_Bc = tf.reshape(state.score_BW[..., None] + gain_BWc, flat)
    score_BW, choice_BW = top_few(score_Bc, beam)
    token_BW = tf.gather(tf.reshape(token, flat), choice_BW, batch_dims=1)
    gain_BW = tf.gather(tf.reshape(gain_BWc, flat), choice_BW, batch_dims=1)
    return (score_BW, token_BW, choice_BW // beam, gain_BW), normalizer_BW


def _is_among_best(end_BWe: tf.Tensor, other_BW: tf.Tensor, count: int) -> tf.Tensor:
    """Returns whether each end is one of the `count` best of all ends and other scores."""
    batch, beam, ends = end_BWe.shape
    all_Bc = tf.concat([other_BW, tf.reshape(end_BWe, [batch, beam * ends])], 1)
    is_better_BWec = all_Bc[:, None, None, :] > end_BWe[..., None]
    better_BWe = tf.reduce_sum(tf.cast(is_better_BWec, tf.int32), -1)
    return (better_BWe < count) & _exists(end_BWe)


def _exists(score: tf.Tensor) -> tf.Tensor:
    """Returns whether hypotheses with these log probabilities exist.

    A hypothesis with a forbidden token does not exist. In its first steps, a beam may have fewer
    than W hypotheses.
    """
    return score > IMPOSSIBLE / 2


def _coverage_term(state: NestedMap) -> tf.Tensor:
    """Returns the weighted coverage [B,W] of the hypotheses; 0 if coverage does not count."""
    if "coverage_BWK" not in state:
        return tf.zeros_like(state.score_BW)
    received_BWK = tf.clip_by_value(state.coverage_BWK, _NO_ATTENTION, 1.0)
    is_source_BK = state.memory.bias_BK >= 0
    logs_BWK = tf.where(is_source_BK[:, None, :], tf.math.log(received_BWK), 0.0)
    return state.coverage_weight_B[:, None] * tf.reduce_sum(logs_BWK, -1)
