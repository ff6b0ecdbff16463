"""Random numbers from a key, the same whether a function runs eagerly or is compiled.

Most are made from Philox words (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
TensorFlow's own float samplers turn the same words into other numbers under XLA than without it,
and the algorithm it picks by itself is 100 times slower than Philox under XLA on a CPU.

What a pass draws (dropout, random routing) is more than all else together, and may be simpler:
`hashed_words` costs a few integer operations, which XLA fuses into whatever uses them and cuts with
it over a mesh. Philox took 8% of a training step, and half of its program.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_PHILOX = tf.random.Algorithm.PHILOX


def fold_in(key: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the int32 [2] key `key` mixed with a name."""
    return fold_in_word(key, word(name))


def word(name: str) -> int:
    """Returns the 31 bits that a name is mixed into keys as."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def fold_in_word(key: tf.Tensor, word: int | tf.Tensor) -> tf.Tensor:
    """Returns the int32 [2] key `key` mixed with the word of a name."""
    return tf.random.experimental.stateless_fold_in(key, word, alg=_PHILOX)


def hashed_fold_in_word(key: tf.Tensor, word: int | tf.Tensor) -> tf.Tensor:
    """Returns the int32 [2] key `key` mixed with the word of a name, for `hashed_words`."""
    first, second = tf.unstack(tf.bitcast(key, tf.uint32))
    word = tf.cast(word, tf.uint32)
    one = _hash(_hash(_hash(first) + second) + word)
    other = _hash(_hash(_hash(word) + first) + second)
    return tf.bitcast(tf.stack([one, other]), tf.int32)


def words(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns uniform uint32 numbers."""
    return tf.random.stateless_uniform(
        shape, key, minval=None, maxval=None, dtype=tf.uint32, alg=_PHILOX
    )


def hashed_words(
    shape: Sequence[int], key: tf.Tensor, order: np.ndarray | None = None
) -> tf.Tensor:
    """Returns uint32 numbers, each a hash of its index and the key; good enough for masks.

    order: the indices along the first dimension, where they are not 0, 1, 2, ...
    """
    return hashed(_index(shape, order), key)


def hashed(values: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Returns uint32 numbers, each a hash of an integer and the key.

    Two rounds of the 32-bit integer hash of low bias by C. Wellons
    (https://nullprogram.com/blog/2018/07/31/), the key's words added before each.
    """
    first, second = tf.unstack(tf.bitcast(key, tf.uint32))
    return _hash(_hash(tf.cast(values, tf.uint32) + first) + second)


def _index(shape: Sequence[int], order: np.ndarray | None) -> tf.Tensor:
    """Each element's place in row-major order, uint32; a sum over dimensions can be partitioned."""
    index = tf.zeros([1] * len(shape), tf.uint32)
    stride = 1
    for dimension in reversed(range(len(shape))):
        along = [-1 if d == dimension else 1 for d in range(len(shape))]
        places = tf.range(shape[dimension]) if dimension or order is None else tf.constant(order)
        steps = tf.cast(places, tf.uint32) * tf.constant(stride, tf.uint32)
        index += tf.reshape(steps, along)
        stride = stride * shape[dimension] % 2**32
    return index


def _hash(x: tf.Tensor) -> tf.Tensor:
    constant = lambda value: tf.constant(value, tf.uint32)  # noqa: E731
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, constant(16))) * constant(0x7FEB352D)
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, constant(15))) * constant(0x846CA68B)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, constant(16)))


def uniform(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers uniform in the open interval (0, 1), of 23 random bits each."""
    return _in_unit_interval(words(shape, key))


def hashed_uniform(
    shape: Sequence[int], key: tf.Tensor, order: np.ndarray | None = None
) -> tf.Tensor:
    """Returns float32 numbers uniform in the open interval (0, 1), as `hashed_words` makes them."""
    return _in_unit_interval(hashed_words(shape, key, order))


def hashed_uniform_of(values: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Returns a float32 number, uniform in (0, 1), for each integer: what `hashed` makes of it."""
    return _in_unit_interval(hashed(values, key))


def _in_unit_interval(words: tf.Tensor) -> tf.Tensor:
    bits = tf.cast(tf.bitwise.right_shift(words, tf.constant(9, tf.uint32)), tf.float32)
    return (bits + 0.5) * 2.0**-23


def normal(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers of a standard Gaussian, by the inverse of its distribution."""
    return tf.math.erfinv(2.0 * uniform(shape, key) - 1.0) * math.sqrt(2.0)


def truncated_normal(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers of a standard Gaussian cut at two standard deviations."""
    share_within = math.erf(math.sqrt(2.0))
    return tf.math.erfinv((2.0 * uniform(shape, key) - 1.0) * share_within) * math.sqrt(2.0)
