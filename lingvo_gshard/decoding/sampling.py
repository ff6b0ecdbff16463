"""Sampling: texts that go on from given tokens, each token drawn from what the model expects."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.models import LanguageModel

_SPREAD = 0x9E3779B9


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Which of the tokens that a model expects is taken.

    temperature: what logits are divided by; 0 takes the likeliest token. top_k: so many of the
    likeliest are drawn from, 0: all (Fan et al. 2018, arXiv 1805.04833). top_p: the fewest that
    together have this probability (Holtzman et al. 2019, arXiv 1904.09751).
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
        """Returns an int32 id for each row of float32 logits.

        What is drawn for a row depends on its own uint32 word and on the int32 [2] key. It is the
        largest logit with Gumbel noise, whose distribution is the softmax's (Gumbel 1954).
        """
        if not self.temperature:
            return tf.argmax(logits_BV, -1, output_type=tf.int32)
        logits_BV /= self.temperature
        for least_B1 in self._least(logits_BV):
            logits_BV = tf.where(logits_BV < least_B1, logits_BV.dtype.min, logits_BV)
        # 2^32 over the golden ratio: rows of neighbouring words share no numbers.
        spread_V = _range(logits_BV.shape[1]) * tf.constant(_SPREAD, tf.uint32)
        uniform_BV = random_numbers.hashed_uniform_of(words_B[:, None] + spread_V, key)
        noisy_BV = logits_BV - tf.math.log(-tf.math.log(uniform_BV))
        return tf.argmax(noisy_BV, -1, output_type=tf.int32)

    def _least(self, logits_BV: tf.Tensor) -> list[tf.Tensor]:
        """The logits [B,1] below which a token is not drawn."""
        least = []
        if 0 < self.top_k < logits_BV.shape[1]:
            least.append(tf.math.top_k(logits_BV, self.top_k).values[:, -1:])
        if self.top_p < 1:
            sorted_BV = tf.sort(logits_BV, direction="DESCENDING")
            before_BV = tf.cumsum(tf.nn.softmax(sorted_BV), axis=1, exclusive=True)
            drawn_BV = tf.where(before_BV < self.top_p, sorted_BV, logits_BV.dtype.max)
            least.append(tf.reduce_min(drawn_BV, 1, keepdims=True))
        return least


def write_on(
    task: LanguageModel,
    theta: NestedMap,
    given_BL: tf.Tensor,
    before_B: tf.Tensor,
    samples_B: tf.Tensor,
    eos_id: int,
    sampling: Sampling,
    key: tf.Tensor,
) -> tf.Tensor:
    """Returns int32 [B,L] ids: those given, and what is drawn after them; eos_id from the end on.

    given: ids, 0 where they are to be found. before: the id that stands before each row's first; 0
    for rows that there are not. samples: int32, the number of each row among those of one text. A
    row's ids depend on what is given of it, its sample and the int32 [2] key alone.
    """
    batch, length = given_BL.shape
    words_B = _words(tf.concat([before_B[:, None], given_BL, samples_B[:, None]], 1), key)

    def is_under_way(step, ids_B, active_B, output_BL, cache):
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
    _, _, _, output_BL, _ = tf.while_loop(is_under_way, extend, state)
    return output_BL


def _words(ids_BL: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """A uint32 word for each row, which depends on its ids and their order."""
    length = ids_BL.shape[1]
    numbered_BL = tf.cast(ids_BL, tf.uint32) * tf.constant(length, tf.uint32) + _range(length)
    hashed_BL = tf.bitcast(random_numbers.hashed(numbered_BL, key), tf.int32)
    return tf.bitcast(tf.reduce_sum(hashed_BL, 1), tf.uint32)


def _range(size: int) -> tf.Tensor:
    return tf.cast(tf.range(size), tf.uint32)
