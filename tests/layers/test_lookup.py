"""Table lookup with gradients that are summed in float32."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.attention.dense import add_bias
from lingvo_gshard.layers.products import lookup


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_their_summed_gradients(dtype):
    table = tf.cast(tf.constant(np.random.default_rng(1).normal(size=(5, 3))), dtype)
    ids = tf.constant([[1, 1, 4], [0, 1, 1]])
    with tf.GradientTape() as tape:
        tape.watch(table)
        rows = lookup(table, ids)
        loss = tf.reduce_sum(rows)
    assert rows.dtype == tf.float32
    np.testing.assert_array_equal(rows, tf.cast(table, tf.float32).numpy()[ids])
    gradient = tf.convert_to_tensor(tape.gradient(loss, table))
    assert gradient.dtype == dtype
    counts = np.array([1.0, 4.0, 0.0, 0.0, 1.0])[:, None]
    np.testing.assert_array_equal(tf.cast(gradient, tf.float32), np.repeat(counts, 3, 1))


def test_gradients_of_a_frequent_row_are_summed_in_float32():
    """A sum in bfloat16 would stay at 256, since 1 is half a unit in its last place."""
    table = tf.zeros([2, 1], tf.bfloat16)
    with tf.GradientTape() as tape:
        tape.watch(table)
        loss = tf.reduce_sum(lookup(table, tf.ones([1024], tf.int32)))
    assert float(tape.gradient(loss, table)[1, 0]) == 1024.0


def test_a_bias_keeps_the_type_of_x_and_sums_its_gradient_in_float32():
    x, bias = tf.ones([1024, 2], tf.float16), tf.constant([0.5, 1.0])
    with tf.GradientTape() as tape:
        tape.watch(bias)
        y = add_bias(x, bias)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * 1000.0)
    assert y.dtype == tf.float16
    np.testing.assert_array_equal(y[0], [1.5, 2.0])
    # More than float16 holds.
    np.testing.assert_array_equal(tape.gradient(loss, bias), [1024e3, 1024e3])
