"""Choosing the largest of many numbers without sorting them.

XLA for CPU compares values one by one in tf.argmax and tf.math.top_k. Maxima are vectorized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lingvo_gshard.core import tf

LOCAL_LETTERS = {"b": "blocks of a row", "c": "largest values", "v": "values of a block"}

_LEAST = -float("inf")
_BLOCK = 64


def top_few(
    x_RV: tf.Tensor, count: int, without: Sequence[int] = ()
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the `count` largest values [R,c] of each row and their int32 indices, largest first.

    Of equal values the first ones are taken. The largest values are within the `count` blocks with
    the largest maxima.

    Args:
      x_RV: numbers, in rows.
      count: a few; the cost grows with it.
      without: a few indices that are not taken. They cost less than to change their values, which
        writes all numbers again.
    """
    rows, size = x_RV.shape
    if size <= _BLOCK * count:
        index_RV = tf.broadcast_to(tf.range(size), [rows, size])
        return _top_few(_barred(x_RV, index_RV, without), index_RV, count, size - 1)
    block = _block_of(size)
    blocks = -(-size // block)
    x_RV = tf.pad(x_RV, [[0, 0], [0, blocks * block - size]], constant_values=_LEAST)
    x_Rbv = tf.reshape(x_RV, [rows, blocks, block])
    number_b = tf.range(blocks)
    most_Rb = tf.reduce_max(x_Rbv, -1)
    for own in sorted({index // block for index in without}):
        own_Rv = _barred(x_Rbv[:, own], own * block + tf.range(block), without)
        own_R1 = tf.reduce_max(own_Rv, -1, keepdims=True)
        most_Rb = tf.where(tf.equal(number_b, own), own_R1, most_Rb)
    number_Rb = tf.broadcast_to(number_b, [rows, blocks])
    _, chosen_Rc = _top_few(most_Rb, number_Rb, count, blocks - 1)
    kept_Rcv = tf.gather(x_Rbv, chosen_Rc, batch_dims=1)
    index_Rcv = chosen_Rc[..., None] * block + tf.range(block)
    kept_Rcv = _barred(kept_Rcv, index_Rcv, without)
    flat = [rows, count * block]
    return _top_few(tf.reshape(kept_Rcv, flat), tf.reshape(index_Rcv, flat), count, size - 1)


def _barred(x: tf.Tensor, index: tf.Tensor, without: Sequence[int]) -> tf.Tensor:
    """Returns numbers with the least value at some indices."""
    for barred in without:
        x = tf.where(tf.equal(index, barred), _LEAST, x)
    return x


def _block_of(size: int) -> int:
    """Returns a block size near the ideal that divides `size`, if there is one."""
    divisors = [d for d in range(_BLOCK // 2, 2 * _BLOCK) if size % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d / _BLOCK)), default=_BLOCK)


def _top_few(
    x_Rv: tf.Tensor, index_Rv: tf.Tensor, count: int, last: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the `count` largest values and their indices. `last` is the largest valid index."""
    values, indices = [], []
    for _ in range(count):
        value_R1 = tf.reduce_max(x_Rv, -1, keepdims=True)
        # Of a row of NaNs no element equals the maximum.
        at_most = tf.where(tf.equal(x_Rv, value_R1), index_Rv, last)
        index_R1 = tf.reduce_min(at_most, -1, keepdims=True)
        x_Rv = tf.where(tf.equal(index_Rv, index_R1), _LEAST, x_Rv)
        values.append(value_R1)
        indices.append(index_R1)
    return tf.concat(values, -1), tf.concat(indices, -1)
