"""Tests dropout: rate, expectation, and equal masks in all modes of execution."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.testing.layers import assert_close


def drop(x, rate: float, seed: int = 1, training: bool = True, path: str = "dropout"):
    layer = Dropout.params().set(rate=rate).instantiate(path=path)
    with context.scope(training=training, seed=tf.constant([seed, 0])):
        return layer.fprop(layer.init(1), tf.convert_to_tensor(x))


class DropoutTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(0.1, 0.5, 0.9)
    def test_drops_a_fraction_of_the_elements(self, rate):
        x = np.ones((64, 512), np.float32)
        y = drop(x, rate).numpy()
        self.assertLess(abs((y == 0).mean() - rate), 0.01)
        self.assertEqual(len(np.unique(y)), 2)
        assert_close(y.mean(), 1.0, "sampling")

    @parameterized.parameters(((5,),), ((3, 7),), ((2, 1),), ((2, 3, 8),))
    def test_masks_are_equal_when_compiled(self, shape):
        x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        compiled = tf.function(lambda x: drop(x, 0.5), jit_compile=True)
        y = drop(x, 0.5)
        self.assertEqual(y.shape, shape)
        self.assertAllEqual(y, compiled(tf.constant(x)))

    def test_masks_depend_on_seed_and_path(self):
        x = np.ones((8, 8), np.float32)
        self.assertAllEqual(drop(x, 0.5), drop(x, 0.5))
        self.assertFalse(np.array_equal(drop(x, 0.5), drop(x, 0.5, seed=2)))
        self.assertFalse(np.array_equal(drop(x, 0.5), drop(x, 0.5, path="other")))

    def test_whole_vectors_share_their_fate(self):
        layer = Dropout.params().set(rate=0.25, whole_vectors=True).instantiate(path="dropout")
        with context.scope(training=True, seed=tf.constant([1, 0])):
            y_BLM = layer.fprop(layer.init(1), tf.ones([64, 128, 3])).numpy()
        self.assertEqual(set(np.unique(y_BLM)), {0, np.float32(1 / 0.75)})
        self.assertTrue((y_BLM == y_BLM[..., :1]).all())
        self.assertLess(abs((y_BLM[..., 0] == 0).mean() - 0.25), 0.02)

    def test_neighbors_are_independent(self):
        kept = drop(np.ones((256, 64), np.float32), 0.5).numpy() > 0
        for distance in (1, 2, 3):
            agree = (kept[:, distance:] == kept[:, :-distance]).mean()
            self.assertLess(abs(agree - 0.5), 0.02)

    def test_the_gradient_is_the_mask(self):
        x = tf.ones([4, 6])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = drop(x, 0.5)
        self.assertAllEqual(tape.gradient(y, x), y)

    def test_dropped_elements_pass_no_gradient_however_large(self):
        x = tf.ones([4, 64])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = drop(x, 0.5)
            is_kept = y.numpy() != 0
            # Of the dropped elements, the gradient of y is infinite.
            z = tf.reduce_sum(y * tf.where(is_kept, 1.0, np.inf))
        self.assertAllEqual(tape.gradient(z, x), np.where(is_kept, 2.0, 0.0))

    def test_exempt_elements_stay_as_they_are(self):
        layer = Dropout.params().set(rate=0.5).instantiate(path="dropout")
        x = tf.constant(np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32))
        exempt = np.arange(64)[:, None] % 2 == 0
        with context.scope(training=True, seed=tf.constant([1, 0])):
            y = layer.fprop(layer.init(1), x, tf.constant(exempt)).numpy()
            self.assertAllEqual(y[1::2], layer.fprop(layer.init(1), x).numpy()[1::2])
        self.assertAllEqual(y[::2], x[::2])

    def test_evaluation_and_rate_zero_change_nothing(self):
        x = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
        self.assertAllEqual(drop(x, 0.5, training=False), x)
        self.assertAllEqual(drop(x, 0.0), x)

    @parameterized.parameters(-0.1, 1.0, 1.5)
    def test_rejects_rates_outside_the_unit_interval(self, rate):
        message = rf"Dropout\.rate is {rate}; expected a number of 0 or more and below 1"
        with self.assertRaisesRegex(ValueError, message):
            drop(np.ones(4, np.float32), rate)


if __name__ == "__main__":
    testing.main()
