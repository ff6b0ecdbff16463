"""Stateless random numbers that are equal in eager and compiled execution.

Initial weights come from Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3"). TensorFlow's float samplers turn the same bits into different numbers with and without XLA. Its
default algorithm is 100 times slower than Philox under XLA on a CPU.

The forward pass (dropout, random routing) draws far more numbers and needs less quality. Its
`hashed_*` functions cost a few integer operations, which XLA fuses into their consumers and
partitions with them. With Philox, random numbers took 8% of a training step and half of its
program.

In binary floating point 100 * (1.2 * 6) / 8 is 89.99999999999999. A value that differs from
a whole number by a few roundings is taken for that number.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core.lazy import tf

_PHILOX = "philox"
# (shift, factor) of the steps of the low-bias hash, see `hashed`. A last shift follows.
HASH_STEPS = ((16, 0x7FEB352D), (15, 0x846CA68B))


def fold_in(key: tf.Tensor, name: str) -> tf.Tensor:
    """Returns an int32 [2] key derived from a key and a name."""
    return fold_in_word(key, word(name))


def word(name: str) -> int:
    """Returns a 31-bit hash of a name, for the `fold_in_word` functions."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def fold_in_word(key: tf.Tensor, word: int | tf.Tensor) -> tf.Tensor:
    """Returns an int32 [2] key derived from a key and the `word` of a name."""
    if tf.executing_eagerly():
        return _eager_fold_in()(key, word)
    return _philox_fold_in(key, word)


def _philox_fold_in(key: tf.Tensor, word: int | tf.Tensor) -> tf.Tensor:
    # TensorFlow's type stubs lack the function.
    experimental = tf.random.experimental  # pyright: ignore[reportAttributeAccessIssue]
    return experimental.stateless_fold_in(key, word, alg=_PHILOX)


def hashed_fold_in_word(key: tf.Tensor, word: int | tf.Tensor) -> tf.Tensor:
    """Returns a key for the `hashed_*` functions, from an int32 [2] key and a `word`."""
    first, second = tf.unstack(tf.bitcast(key, tf.uint32))
    word = tf.cast(word, tf.uint32)
    one = _hash(_hash(_hash(first) + second) + word)
    other = _hash(_hash(_hash(word) + first) + second)
    return tf.bitcast(tf.stack([one, other]), tf.int32)


def words(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns uniform uint32 numbers from Philox."""
    if tf.executing_eagerly():
        return _eager_words()(tf.constant(shape, tf.int32), key)
    return _philox_words(shape, key)


def _philox_words(shape: Sequence[int] | tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    # None asks for the full range, which TensorFlow's type stubs do not know.
    full_range: Any = None
    return tf.random.stateless_uniform(
        shape, key, minval=full_range, maxval=full_range, dtype=tf.uint32, alg=_PHILOX
    )


# TensorFlow derives a key by dozens of operations. In eager execution one call of a function that
# was traced once is 15 times as fast.
@functools.cache
def _eager_fold_in() -> Callable[..., tf.Tensor]:
    signature = [tf.TensorSpec([2], tf.int32), tf.TensorSpec([], tf.int32)]
    return tf.function(_philox_fold_in, input_signature=signature, autograph=False)


@functools.cache
def _eager_words() -> Callable[..., tf.Tensor]:
    signature = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([2], tf.int32)]
    return tf.function(_philox_words, input_signature=signature, autograph=False)


def hashed_words(
    shape: Sequence[int], key: tf.Tensor, order: tf.Tensor | None = None, dimension: int = 0
) -> tf.Tensor:
    """Returns uint32 numbers, each a hash of its index and the key.

    Args:
      key: int32 [2] key.
      order: Integer indices along one dimension; 0, 1, 2, ... by default.
      dimension: The dimension that `order` belongs to.
    """
    return hashed(_index(shape, order, dimension), key)


def hashed(values: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Returns uint32 numbers, each a hash of an integer and the key.

    It applies two rounds of the low-bias 32-bit hash by C. Wellons
    (https://nullprogram.com/blog/2018/07/31/), and adds one half of the key before each round.

    Args:
      values: Integers of any shape.
      key: int32 [2] key.
    """
    first, second = tf.unstack(tf.bitcast(key, tf.uint32))
    return _hash(_hash(tf.cast(values, tf.uint32) + first) + second)


def threshold(share: float) -> int:
    """Returns the uint32 number that this share of all uint32 numbers is below."""
    return round(share * 2**32)


def index_terms(
    shape: Sequence[int], order: tf.Tensor | None = None, dimension: int = 0
) -> list[tf.Tensor]:
    """Returns a uint32 vector for each dimension, whose sums are the indices of all elements.

    The row-major index of element (i, j, k) is `terms[0][i] + terms[1][j] + terms[2][k]` modulo
    2^32. A part of the array has parts of these vectors. Arguments are as in `hashed_words`.
    """
    terms, stride = [], 1
    for each in reversed(range(len(shape))):
        indices = tf.range(shape[each])
        if order is not None and each == dimension:
            indices = order
        terms.append(tf.cast(indices, tf.uint32) * tf.constant(stride, tf.uint32))
        stride = stride * shape[each] % 2**32
    return terms[::-1]


def _index(shape: Sequence[int], order: tf.Tensor | None, dimension: int) -> tf.Tensor:
    """Returns the row-major index of each element, uint32.

    XLA can partition it, since it is a sum of one range for each dimension.
    """
    index = tf.zeros([1] * len(shape), tf.uint32)
    for each, term in enumerate(index_terms(shape, order, dimension)):
        index += tf.reshape(term, [-1 if d == each else 1 for d in range(len(shape))])
    return index


def _hash(x: tf.Tensor) -> tf.Tensor:
    constant = lambda value: tf.constant(value, tf.uint32)  # noqa: E731
    for shift, factor in HASH_STEPS:
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, constant(shift)))
        x *= constant(factor)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, constant(16)))


def uniform(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers uniform in the open interval (0, 1), with 23 random bits each."""
    return _in_unit_interval(words(shape, key))


def hashed_uniform(
    shape: Sequence[int], key: tf.Tensor, order: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns float32 numbers uniform in the open interval (0, 1), from `hashed_words`."""
    return _in_unit_interval(hashed_words(shape, key, order))


def hashed_uniform_of(values: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Returns a float32 number uniform in (0, 1) for each integer, from `hashed`."""
    return _in_unit_interval(hashed(values, key))


def _in_unit_interval(words: tf.Tensor) -> tf.Tensor:
    bits = tf.cast(tf.bitwise.right_shift(words, tf.constant(9, tf.uint32)), tf.float32)
    return (bits + 0.5) * 2.0**-23


def normal(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns float32 samples of a standard Gaussian, by inverse transform sampling."""
    return tf.math.erfinv(2.0 * uniform(shape, key) - 1.0) * math.sqrt(2.0)


def truncated_normal(shape: Sequence[int], key: tf.Tensor) -> tf.Tensor:
    """Returns float32 samples of a standard Gaussian truncated at two standard deviations."""
    share_within = math.erf(math.sqrt(2.0))
    return tf.math.erfinv((2.0 * uniform(shape, key) - 1.0) * share_within) * math.sqrt(2.0)


# A whole number that was computed may be wrong by 16 roundings of a double, relative to its size.
_TOLERANCE = 2.0**-49


def floor(value: float) -> int:
    """Returns the largest whole number that is not above a value."""
    return math.floor(value + _slack(value))


def ceil(value: float) -> int:
    """Returns the smallest whole number that is not below a value."""
    return math.ceil(value - _slack(value))


def _slack(value: float) -> float:
    return _TOLERANCE * abs(value)
