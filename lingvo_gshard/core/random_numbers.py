"""Random numbers from a key, the same whether a function runs eagerly or is compiled.

All are made from Philox words (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
TensorFlow's own float samplers turn the same words into other numbers under XLA than without it,
and the algorithm it picks by itself is 100 times slower than Philox under XLA on a CPU.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import tensorflow as tf

_PHILOX = tf.random.Algorithm.PHILOX


def fold_in(key: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the int32 [2] key `key` mixed with a name."""
    word = zlib.crc32(name.encode()) & 0x7FFFFFFF
    return tf.random.experimental.stateless_fold_in(key, word, alg=_PHILOX)


def words(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns uniform uint32 numbers."""
    return tf.random.stateless_uniform(
        shape, key, minval=None, maxval=None, dtype=tf.uint32, alg=_PHILOX
    )


def uniform(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers uniform in the open interval (0, 1), of 23 random bits each."""
    bits = tf.cast(tf.bitwise.right_shift(words(shape, key), tf.constant(9, tf.uint32)), tf.float32)
    return (bits + 0.5) * 2.0**-23


def normal(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers of a standard Gaussian, by the inverse of its distribution."""
    return tf.math.erfinv(2.0 * uniform(shape, key) - 1.0) * math.sqrt(2.0)


def truncated_normal(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers of a standard Gaussian cut at two standard deviations."""
    share_within = math.erf(math.sqrt(2.0))
    return tf.math.erfinv((2.0 * uniform(shape, key) - 1.0) * share_within) * math.sqrt(2.0)
