"""Sampling: continues texts with tokens drawn from the model's distribution."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.models import LanguageModel

_SPREAD = 0x9E3779B9


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Draws tokens from the distribution that a model predicts.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draws from this many most likely tokens; 0: from all (Fan et al. 2018, arXiv
        1805.04833).
      top_p: draws from the fewest tokens whose probabilities sum to this; 1: from all (Holtzman et
        al. 2019, arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; 0 or more was expected")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; 0 or more was expected")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; more than 0 and at most 1 was expected")

    def take(self, logits_BV: tf.Tensor, words_B: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Returns an int32 id for each row.

        With Gumbel noise added, the largest logit is distributed as the softmax (Gumbel 1954).

        Args:
          logits_BV: float32 logits.
          words_B: uint32 word of each row; rows with different words draw independently.
          key: int32 [2] random key.
        """
        if not self.temperature:
            return tf.argmax(logits_BV, -1, output_type=tf.int32)
        logits_BV /= self.temperature
        for least_B1 in self._least(logits_BV):
            logits_BV = tf.where(logits_BV < least_B1, logits_BV.dtype.min, logits_BV)
        # 2^32 over the golden ratio, so that rows with adjacent words share no random numbers.
        spread_V = _range(logits_BV.shape[1]) * tf.constant(_SPREAD, tf.uint32)
        uniform_BV = random_numbers.hashed_uniform_of(words_B[:, None] + spread_V, key)
        noisy_BV = logits_BV - tf.math.log(-tf.math.log(uniform_BV))
        return tf.argmax(noisy_BV, -1, output_type=tf.int32)

    def _least(self, logits_BV: tf.Tensor) -> list[tf.Tensor]:
        """Returns thresholds [B,1]: tokens with logits below any of them are not drawn."""
        least = []
        if 0 < self.top_k < logits_BV.shape[1]:
            least.append(tf.math.top_k(logits_BV, self.top_k).values[:, -1:])
        if self.top_p < 1:
            sorted_BV = tf.sort(logits_BV, direction="DESCENDING")
            before_BV = tf.cumsum(tf.nn.softmax(sorted_BV), axis=1, exclusive=True)
            drawn_BV = tf.where(before_BV < self.top_p, sorted_BV, logits_BV.dtype.max)
            least.append(tf.reduce_min(drawn_BV, 1, keepdims=True))
        return least


def continue_texts(
    task: LanguageModel,
    theta: NestedMap,
    given_BL: tf.Tensor,
    before_B: tf.Tensor,
    samples_B: tf.Tensor,
    eos_id: int,
    sampling: Sampling,
    key: tf.Tensor,
) -> tf.Tensor:
    """Continues given tokens by sampling.

    The ids of a row depend only on its own arguments and the key, not on other rows.

    Args:
      task: the model.
      theta: weights of the model.
      given_BL: int32 ids to start with, 0 at the positions to be drawn.
      before_B: int32 id before the first position of each row; 0 for an unused row.
      samples_B: int32 number of each row among the samples of one text.
      eos_id: id that ends a text.
      sampling: how to draw tokens.
      key: int32 [2] random key.

    Returns:
      int32 [B,L] ids: the given ones and those drawn; `eos_id` at and after the end of a text.
    """
    batch, length = given_BL.shape
    words_B = _words(tf.concat([before_B[:, None], given_BL, samples_B[:, None]], 1), key)

    def is_running(step, ids_B, active_B, output_BL, cache):
        del ids_B, output_BL, cache
        return (step < length) & tf.reduce_any(active_B > 0)

    def extend(step, ids_B, active_B, output_BL, cache):
        logits_BV, cache = task.decode_step(theta, ids_B, active_B, step, cache)
        given_B = tf.gather(given_BL, step, axis=1)
        step_key = random_numbers.hashed_fold_in_word(key, step)
        ids_B = tf.where(given_B > 0, given_B, sampling.take(logits_BV, words_B, step_key))
        ids_B = tf.where(active_B > 0, ids_B, eos_id)
        at_step = tf.equal(tf.range(length), step)[None, :]
        output_BL = tf.where(at_step, ids_B[:, None], output_BL)
        return step + 1, ids_B, tf.where(tf.equal(ids_B, eos_id), 0, active_B), output_BL, cache

    state = (
        tf.constant(0),
        before_B,
        tf.cast(before_B > 0, tf.int32),
        tf.fill([batch, length], eos_id),
        task.init_cache(theta, batch, length),
    )
    _, _, _, output_BL, _ = tf.while_loop(is_running, extend, state)
    return output_BL


def _words(ids_BL: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Returns a uint32 hash of each row's ids and their order."""
    length = ids_BL.shape[1]
    numbered_BL = tf.cast(ids_BL, tf.uint32) * tf.constant(length, tf.uint32) + _range(length)
    hashed_BL = tf.bitcast(random_numbers.hashed(numbered_BL, key), tf.int32)
    return tf.bitcast(tf.reduce_sum(hashed_BL, 1), tf.uint32)


def _range(size: int) -> tf.Tensor:
    return tf.cast(tf.range(size), tf.uint32)
