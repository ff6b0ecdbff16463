"""Functions that are right on one device and wrong on a mesh, in one way each.

Each takes X, [16,8], and computes in a manual region over `data=N,model=N`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.sharding.collectives import all_gather, axis_index, psum, rotate
from lingvo_gshard.sharding.manual import manual, mesh_in_use

ROWS, COLUMNS, WHOLE, VECTOR = (("data",), ()), ((), ("model",)), ((), ()), ((),)
BOTH = (("data", "model"), ())
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
# Rows that count. Their number differs between shards of two, four and eight rows.
IS_COUNTED = (np.arange(16) % 8 >= np.arange(16) // 4).astype(np.float32)[:, None]


def region(in_split, out_split) -> Callable:
    """Decorates a function of a shard, and maybe of its weights, as one of the full tensors."""

    def decorated(on_device: Callable) -> Callable:
        @functools.wraps(on_device)
        def run(*tensors):
            return manual(on_device, [in_split] * len(tensors), out_split)(*tensors)

        return run

    return decorated


def devices(axis: str) -> int:
    mesh = mesh_in_use()
    return mesh.axis_size(axis) if mesh else 1


@region(ROWS, VECTOR)
def sum_is_missing(x):
    return tf.reduce_sum(x, 0)


@region((("data",), ("model",)), (("data",),))
def sum_is_missing_in_rows(x):
    return tf.reduce_sum(x, 1)


@region((("data",), ("model",)), (("data",),))
def sum_over_the_wrong_axis(x):
    return psum(tf.reduce_sum(x, 1), "data")


@region(ROWS, VECTOR)
def mean_is_missing(x):
    return tf.reduce_mean(x, 0)


@region(ROWS, VECTOR)
def summed_twice(x):
    return psum(psum(tf.reduce_sum(x, 0), "data"), "data")


@region(COLUMNS, VECTOR)
def averaged(x):
    return psum(tf.reduce_sum(x, 1), "model") / devices("model")


@region(ROWS, VECTOR)
def divided_by_local_root(x):
    return psum(tf.reduce_sum(x, 0), "data") / tf.sqrt(float(x.shape[0]))


def mean_of_means(x):
    @region(ROWS, VECTOR)
    def mean(x, w):
        return psum(tf.reduce_sum(x * w, 0) / tf.reduce_sum(w), "data") / devices("data")

    return mean(x, tf.constant(IS_COUNTED))


@region(BOTH, VECTOR)
def summed_over_one_of_two_axes(x):
    return psum(tf.reduce_sum(x, 0), "data")


def mean_of_means_of_all(x):
    @region(COLUMNS, VECTOR)
    def mean(x, w):
        total = tf.reduce_sum(tf.square(x) * w)
        return psum(tf.math.divide_no_nan(total, tf.reduce_sum(w))[None], "model") / devices(
            "model"
        )

    return mean(x, tf.constant(np.arange(8.0, dtype=np.float32)[None]))


@region(ROWS, VECTOR)
def mean_of_means_by_a_gate(x):
    gate = tf.nn.relu(x[:, :1])
    total = tf.reduce_sum(tf.square(x) * gate)[None]
    return psum(total / tf.reduce_sum(gate), "data") / devices("data")


@region(ROWS, VECTOR)
def maximum_is_missing(x):
    return tf.reduce_max(x, 0)


@region(ROWS, VECTOR)
def square_before_sum(x):
    return psum(tf.square(tf.reduce_sum(x, 0)), "data")


@region(ROWS, VECTOR)
def logarithm_of_nothing(x):
    return psum(tf.math.log(tf.reduce_sum(tf.nn.relu(x - 1.0), 0)), "data")


@region(BOTH, (("model", "data"), ()))
def axes_swapped(x):
    return tf.identity(x)


@region(ROWS, WHOLE)
def dimensions_swapped(x):
    return tf.reshape(all_gather(x, "data", 1), [16, 8])


@region(ROWS, ROWS)
def joined_along_another_dimension(x):
    return tf.transpose(x)


@region((("data",), ("model",)), (("data",), ("model",)))
def gathered_interleaved(x):
    n = devices("model")
    whole = tf.reshape(all_gather(x, "model", 1), [x.shape[0], n, x.shape[1]])
    whole = tf.reshape(tf.transpose(whole, [0, 2, 1]), [x.shape[0], n * x.shape[1]])
    return tf.gather(whole, axis_index("model") * x.shape[1] + tf.range(x.shape[1]), axis=1)


@region(ROWS, ROWS)
def gathered_from_the_first(x):
    return tf.gather(all_gather(x, "data", 0), tf.range(x.shape[0]))


@region(ROWS, ROWS)
def gathered_from_the_next(x):
    return rotate(x, "data")


@region(ROWS, ROWS)
def gathered_a_row_off(x):
    whole = all_gather(x, "data", 0)
    off = 1 if devices("data") > 1 else 0
    return tf.gather(whole, (axis_index("data") * x.shape[0] + tf.range(x.shape[0]) + off) % 16)


@region(ROWS, ROWS)
def reversed_in_shards(x):
    return x[::-1] if devices("data") > 1 else x


@region(ROWS, ROWS)
def sorted_in_shards(x):
    return tf.sort(x, 0)


@region(ROWS, ROWS)
def masked_by_position_in_shard(x):
    return x * tf.cast(tf.range(x.shape[0]) >= 2, x.dtype)[:, None]


@region(ROWS, ROWS)
def position_in_shard_added(x):
    return x + tf.cast(tf.range(x.shape[0]), x.dtype)[:, None]


@region(ROWS, ROWS)
def sine_of_position_in_shard(x):
    return x + tf.sin(tf.cast(tf.range(x.shape[0]), x.dtype))[:, None]


@region(ROWS, ROWS)
def running_sum_without_carry(x):
    return tf.cumsum(x, 0)


@region(COLUMNS, COLUMNS)
def running_sum_from_the_end(x):
    return tf.cumsum(x, 1, exclusive=True, reverse=True)


@region(ROWS, ROWS)
def running_product_without_carry(x):
    return tf.math.cumprod(x, 0)


@region(COLUMNS, COLUMNS)
def softmax_of_shard(x):
    return tf.nn.softmax(x, 1)


@region(ROWS, ROWS)
def norm_of_shard(x):
    return x / tf.sqrt(tf.reduce_mean(x * x))


@region(ROWS, ROWS)
def batch_norm_of_shard(x):
    centered = x - tf.reduce_mean(x, 0)
    return centered / tf.sqrt(tf.reduce_mean(tf.square(centered), 0))


@region(COLUMNS, COLUMNS)
def mean_of_shard_subtracted(x):
    return x - tf.reduce_mean(x, 1, keepdims=True)


@region(ROWS, ROWS)
def tail_is_dropped(x):
    n = devices("data")
    is_last = tf.cast(tf.equal(axis_index("data"), n - 1), x.dtype) if n > 1 else 0.0
    return x * (1.0 - is_last)


@region(ROWS, VECTOR)
def tail_is_not_summed(x):
    n = devices("data")
    is_last = tf.cast(tf.equal(axis_index("data"), n - 1), x.dtype) if n > 1 else 0.0
    return psum(tf.reduce_sum(x * (1.0 - is_last), 0), "data")


@region(ROWS, ROWS)
def only_the_first_shard(x):
    return x * tf.cast(tf.equal(axis_index("data"), 0), x.dtype)


@region(ROWS, VECTOR)
def only_the_first_shard_summed(x):
    return all_gather(tf.reduce_sum(x, 0)[None], "data", 0)[0]


@region(ROWS, VECTOR)
def maximum_for_sum(x):
    return tf.reduce_max(all_gather(tf.reduce_sum(x, 0)[None], "data", 0), 0)


@region(ROWS, VECTOR)
def summed_in_bfloat16(x):
    return tf.cast(psum(tf.cast(tf.reduce_sum(x, 0), tf.bfloat16), "data"), x.dtype)


@region(ROWS, VECTOR)
def accumulated_in_float16(x):
    total = tf.zeros([x.shape[1]], tf.float16)
    for row in tf.unstack(x):
        total += tf.cast(row, tf.float16)
    return psum(tf.cast(total, x.dtype), "data")


@region(ROWS, VECTOR)
def another_key_on_each_device(x):
    key = random_numbers.hashed_fold_in_word(tf.constant([1, 2], tf.int32), axis_index("model"))
    return psum(tf.reduce_sum(x, 0), "data") * random_numbers.hashed_uniform([8], key)


@region(ROWS, ROWS)
def one_key_for_all_rows(x):
    return x * random_numbers.hashed_uniform([*x.shape], tf.constant([1, 2], tf.int32))


@region(COLUMNS, WHOLE)
def bias_added_by_each_device(x):
    return psum(tf.reduce_sum(x, 1, keepdims=True) + tf.range(1.0, 9.0), "model")


@region(ROWS, ROWS)
def neighbors_are_missing(x):
    return x + tf.pad(x, [[1, 0], [0, 0]])[:-1]


def gradient_alone(defect: Callable) -> Callable:
    """Returns a function whose result is right, and whose gradient is what the defect makes of X.

    Args:
      defect: a function of X.
    """

    @custom_gradient
    def identity(x, like):
        return tf.reduce_sum(x * like), lambda d: (d * defect(tf.constant(X)), None)

    def loss_and_gradient(x):
        like = tf.zeros(defect(tf.constant(X)).shape)
        at = tf.zeros_like(like) + 0.0 * tf.reduce_sum(x)
        with tf.GradientTape() as tape:
            tape.watch(at)
            loss = identity(at, like)
        return loss, tape.gradient(loss, at)

    return loss_and_gradient
