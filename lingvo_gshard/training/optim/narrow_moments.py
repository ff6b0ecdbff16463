"""Moments in fewer bits: what an optimizer keeps between steps in place of float32.

bfloat16: the upper half of the float32.

int8: 8 bits for each element and a float32 scale for each block (Dettmers et al. 2021, arXiv
2110.02861, section 2). Here a block is a row along the last dimension, so that the scales are split
as the rows are, and the levels are scale x (q / Q)^2, finer towards zero. The second moment, which
spans the square of what gradients span, is kept by its root, and no element of it reads as less
than the lowest level: an element that fell to zero would be divided by almost nothing.

Both are rounded at random, so that what is kept is on average what it should be: a moment moves in
a step by a share of itself (1 - beta) that is often less than half a level, and would not move at
all if rounded to the nearest. The random numbers come from the step and the moment's path.
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core import random_numbers

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
DTYPES = (FLOAT32, BFLOAT16, INT8)

_SIGNED_LEVELS, _ROOT_LEVELS = 127, 255


def key(path: str, step: tf.Tensor) -> tf.Tensor:
    """Returns the int32 [2] key that a moment is rounded with after a step."""
    return tf.stack([tf.constant(random_numbers.word(path), tf.int32), tf.cast(step, tf.int32)])


def to_bfloat16(x: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Returns float32 `x` as one of its two bfloat16 neighbors, by chance as near as each is."""
    below = tf.constant(0xFFFF, tf.uint32)
    chance = tf.bitwise.bitwise_and(random_numbers.hashed_words(x.shape.as_list(), key), below)
    bits = tf.bitcast(x, tf.uint32) + chance
    upper = tf.bitwise.bitwise_and(bits, tf.bitwise.invert(below))
    return tf.cast(tf.bitcast(upper, tf.float32), tf.bfloat16)


def quantize(x: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (int8 levels, float32 scales) of a float32 moment; scales lack the last dimension."""
    levels, scale = _levels(tf.abs(x), _SIGNED_LEVELS, key)
    return tf.cast(tf.sign(x) * levels, tf.int8), scale


def dequantize(levels: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns the float32 moment that `quantize` kept."""
    share = tf.cast(levels, tf.float32) / _SIGNED_LEVELS
    return tf.expand_dims(scale, -1) * share * tf.abs(share)


def quantize_square(x: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (uint8 levels, float32 scales) of the root of a float32 moment, 0 or more."""
    levels, scale = _levels(tf.sqrt(x), _ROOT_LEVELS, key)
    return tf.cast(levels, tf.uint8), scale


def dequantize_square(levels: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns the float32 moment that `quantize_square` kept, of at least the lowest level."""
    share = tf.maximum(tf.cast(levels, tf.float32), 1.0) / _ROOT_LEVELS
    return tf.square(tf.expand_dims(scale, -1) * share * share)


def _levels(x: tf.Tensor, most: int, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Float32 levels 0..most of what is 0 or more, rounded so that their squares are right."""
    scale = tf.reduce_max(x, -1)
    rows = tf.expand_dims(scale, -1)
    level = tf.minimum(tf.sqrt(tf.math.divide_no_nan(x, rows)), 1.0) * most
    lower = tf.floor(level)
    # From a square to the next one is 2 lower + 1.
    upward = (level * level - lower * lower) / (2.0 * lower + 1.0)
    chance = random_numbers.hashed_uniform(x.shape.as_list(), key)
    return lower + tf.cast(chance < upward, tf.float32), scale
