"""Stores optimizer moments between steps in bfloat16 or int8 instead of float32.

bfloat16 is the upper half of a float32.

int8 stores 8 bits for each element and a float32 scale for each block (Dettmers et al. 2021, arXiv
2110.02861, section 2). A block is a row along the last dimension, so scales are sharded as the rows
are. Levels are scale x (q / Q)^2, finer towards zero. A second moment is stored by its root, since
it spans the square of the gradients' range. Its elements are read as at least the lowest level. The
update would otherwise divide by almost nothing where an element was rounded to zero.

Both formats are rounded stochastically. In a step a moment changes by a share 1 - beta of itself,
often less than half a level, and rounding to nearest would lose every such change. The random
numbers depend on the step and the moment's path.
"""

from __future__ import annotations

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.shapes import known_sizes

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
DTYPES = (FLOAT32, BFLOAT16, INT8)
_SIGNED_LEVELS, _ROOT_LEVELS = 127, 255


def to_bfloat16(x: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Rounds float32 `x` stochastically to bfloat16."""
    below = tf.constant(0xFFFF, tf.uint32)
    chance = tf.bitwise.bitwise_and(random_numbers.hashed_words(known_sizes(x.shape), key), below)
    bits = tf.bitcast(x, tf.uint32) + chance
    upper = tf.bitwise.bitwise_and(bits, tf.bitwise.invert(below))
    return tf.cast(tf.bitcast(upper, tf.float32), tf.bfloat16)


def quantize(x: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns int8 levels [..., N] and float32 scales [...] of a float32 moment [..., N]."""
    levels, scale = _levels(tf.abs(x), _SIGNED_LEVELS, key)
    return tf.cast(tf.sign(x) * levels, tf.int8), scale


def dequantize(levels: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns the float32 moment that `quantize` stored."""
    share = tf.cast(levels, tf.float32) / _SIGNED_LEVELS
    return tf.expand_dims(scale, -1) * share * tf.abs(share)


def quantize_square(x: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns uint8 levels and float32 scales of the root of a moment that is 0 or more."""
    levels, scale = _levels(tf.sqrt(x), _ROOT_LEVELS, key)
    return tf.cast(levels, tf.uint8), scale


def dequantize_square(levels: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns the float32 moment that `quantize_square` stored, at least the lowest level."""
    share = tf.maximum(tf.cast(levels, tf.float32), 1.0) / _ROOT_LEVELS
    return tf.square(tf.expand_dims(scale, -1) * share * share)


def _levels(x: tf.Tensor, most: int, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns levels 0..most, as float32, and scales of x >= 0. Rounds without bias."""
    scale = tf.reduce_max(x, -1)
    rows = tf.expand_dims(scale, -1)
    level = tf.minimum(tf.sqrt(tf.math.divide_no_nan(x, rows)), 1.0) * most
    lower = tf.floor(level)
    # (lower + 1)^2 - lower^2 = 2 lower + 1.
    upward = (level * level - lower * lower) / (2.0 * lower + 1.0)
    chance = random_numbers.hashed_uniform(known_sizes(x.shape), key)
    return lower + tf.cast(chance < upward, tf.float32), scale


def rounding_key(path: str, step: tf.Tensor) -> tf.Tensor:
    """Returns the int32 [2] key of the random numbers that round an array after a step."""
    return tf.stack([tf.constant(random_numbers.word(path), tf.int32), tf.cast(step, tf.int32)])
