# tests: layers/products.py
"""Tests table lookup, whose gradients are summed in float32."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.products import add_bias, lookup


class LookupTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters("float32", "bfloat16")
    def test_rows_and_their_summed_gradients(self, dtype):
        table = tf.cast(tf.constant(np.random.default_rng(1).normal(size=(5, 3))), dtype)
        ids = tf.constant([[1, 1, 4], [0, 1, 1]])
        with tf.GradientTape() as tape:
            tape.watch(table)
            rows = lookup(table, ids)
            loss = tf.reduce_sum(rows)
        self.assertEqual(rows.dtype, tf.float32)
        self.assertAllEqual(rows, tf.cast(table, tf.float32).numpy()[ids])
        gradient = tf.convert_to_tensor(tape.gradient(loss, table))
        self.assertEqual(gradient.dtype, dtype)
        counts = np.array([1.0, 4.0, 0.0, 0.0, 1.0])[:, None]
        self.assertAllEqual(tf.cast(gradient, tf.float32), np.repeat(counts, 3, 1))

    def test_gradients_of_a_frequent_row_are_summed_in_float32(self):
        """Adds 1024 ones. A sum in bfloat16 stays at 256: the next larger number is 258."""
        table = tf.zeros([2, 1], tf.bfloat16)
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(lookup(table, tf.ones([1024], tf.int32)))
        self.assertEqual(float(tape.gradient(loss, table)[1, 0]), 1024.0)

    def test_a_bias_keeps_the_type_of_x_and_sums_its_gradient_in_float32(self):
        x, bias = tf.ones([1024, 2], tf.float16), tf.constant([0.5, 1.0])
        with tf.GradientTape() as tape:
            tape.watch(bias)
            y = add_bias(x, bias)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) * 1000.0)
        self.assertEqual(y.dtype, tf.float16)
        self.assertAllEqual(y[0], [1.5, 2.0])
        # float16 does not hold this sum.
        self.assertAllEqual(tape.gradient(loss, bias), [1024e3, 1024e3])


if __name__ == "__main__":
    testing.main()
