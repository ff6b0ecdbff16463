"""Tests the moments of initializers, and that weights depend only on the key."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import initializers

KEY = tf.constant([3, 4])
SHAPE = (200, 300)


class InitializersTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (initializers.normal(0.5), 0.5, np.inf),
        (initializers.fan_in(100), 0.1, np.inf),
        (initializers.fan_in(100, gain=4.0), 0.2, np.inf),
        (initializers.Initializer("uniform", 0.3), 0.3 / np.sqrt(3), 0.3),
        (initializers.glorot_uniform(100, 200), np.sqrt(2 / 300), np.sqrt(6 / 300)),
        (initializers.Initializer("truncated_normal", 0.5), 0.5 * 0.8796, 1.0),
    )
    def test_samples_have_the_named_moments(self, initializer, deviation, bound):
        weight = initializer(SHAPE, tf.float32, KEY).numpy()
        self.assertEqual(weight.shape, SHAPE)
        self.assertLess(abs(weight.mean()), 4 * deviation / np.sqrt(weight.size))
        self.assertAllClose(weight.std(), deviation, rtol=0.02, atol=0)
        self.assertLessEqual(np.abs(weight).max(), bound * (1 + 1e-6))

    def test_constant_fills_the_weight(self):
        weight = initializers.constant(2.0)((2, 3), tf.bfloat16, KEY)
        self.assertEqual(weight.dtype, tf.bfloat16)
        self.assertAllEqual(tf.cast(weight, tf.float32), np.full((2, 3), 2.0))

    def test_weights_depend_only_on_the_key(self):
        one, same = (initializers.normal(1.0)(SHAPE, tf.float32, KEY) for _ in range(2))
        other = initializers.normal(1.0)(SHAPE, tf.float32, KEY + 1)
        self.assertAllEqual(one, same)
        self.assertFalse(np.allclose(one, other))


if __name__ == "__main__":
    testing.main()
