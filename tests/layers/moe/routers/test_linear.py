# tests: layers/moe/routers/scores.py, layers/moe/routers/router.py, layers/moe/routers/top_k.py
"""Tests features of all learned routers: jitter and the z-loss."""

import numpy as np
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.moe import TopKRouter
from lingvo_gshard.testing.layers import assert_close
from tests.layers.moe.routers import loops

X = np.random.default_rng(1).normal(size=(1, 1000, 4)).astype(np.float32)


def logits(jitter: float, training: bool, seed: int = 1) -> np.ndarray:
    layer, theta = loops.make(TopKRouter, 4, jitter=jitter)
    with context.scope(training=training, seed=tf.constant([seed, 0])):
        return layer.scores.logits(theta, tf.constant(X)).numpy()


class LinearRouterTest(testing.TestCase):
    def test_jitter_multiplies_inputs_by_factors_around_1(self):
        factors = logits(0.25, training=True) / X
        self.assertGreaterEqual(factors.min(), 0.75)
        self.assertLess(factors.min(), 0.76)
        self.assertGreater(factors.max(), 1.24)
        self.assertLessEqual(factors.max(), 1.25)
        assert_close(factors.mean(axis=(0, 1)), np.ones(4), "sampling")
        assert_close(factors.std(), 0.25 / np.sqrt(3), "sampling")

    def test_jitter_depends_on_the_seed_in_training_only(self):
        self.assertAllEqual(logits(0.25, training=False), X)
        self.assertAllEqual(logits(0.0, training=True), X)
        first, again, other = (logits(0.25, True, seed) for seed in (1, 1, 2))
        self.assertAllEqual(first, again)
        self.assertNotAllEqual(first, other)

    def test_logits_of_bfloat16_inputs_are_float32(self):
        x = tf.cast(X, tf.bfloat16)
        layer, theta = loops.make(TopKRouter, 4)
        theta.w_gate = tf.constant(np.random.default_rng(2).normal(size=(4, 4)), tf.float32)
        expected = x.numpy().astype(np.float64) @ theta.w_gate.numpy().astype(np.float64)
        found = layer.scores.logits(theta, x)
        self.assertEqual(found.dtype, tf.float32)
        assert_close(found, expected, "float32")

    def test_a_bias_is_zero_at_first_and_is_added(self):
        layer, theta = loops.make(TopKRouter, 4, use_bias=True)
        self.assertAllEqual(layer.init(1).b_gate, np.zeros(4))
        theta.b_gate = tf.constant([1.0, -2.0, 0.5, 0.0])
        found = layer.scores.logits(theta, tf.constant(X))
        assert_close(found, X + np.array([1.0, -2.0, 0.5, 0.0]), "float32")

    def test_the_z_loss_matches_the_formula(self):
        real = np.random.default_rng(2).random((1, 1000)) < 0.5
        layer, theta = loops.make(TopKRouter, 4, z_loss_weight=0.1)
        loss = loops.route(layer, theta, X, real).losses["z_loss"]
        total = 0.0
        for logits_E in X[real].astype(np.float64):
            total += np.log(np.exp(logits_E).sum()) ** 2
        assert_close(loss.value, total / real.sum(), "float32")
        self.assertEqual(loss.weight, 0.1)

    def test_padding_of_the_z_loss_may_overflow(self):
        real = np.arange(1000)[None] % 2 == 0
        disturbed = tf.constant(np.where(real[..., None], X, 1e30), tf.float32)
        layer, theta = loops.make(TopKRouter, 4, z_loss_weight=0.1)
        with tf.GradientTape() as tape:
            tape.watch(disturbed)
            loss = loops.route(layer, theta, disturbed, real).losses["z_loss"].value
        self.assertAllEqual(loss, loops.route(layer, theta, X, real).losses["z_loss"].value)
        gradient = tape.gradient(loss, disturbed).numpy()
        self.assertTrue(np.isfinite(gradient).all())
        self.assertFalse(gradient[~real].any())

    def test_the_z_loss_requires_a_weight_and_ignores_padding(self):
        self.assertNotIn("z_loss", loops.route(*loops.make(TopKRouter, 4), X).losses)
        layer, theta = loops.make(TopKRouter, 4, z_loss_weight=0.1)
        only_padding = loops.route(layer, theta, X, np.zeros((1, 1000)))
        self.assertEqual(float(only_padding.losses["z_loss"].value), 0)

    def test_rejects_an_unknown_level_of_the_auxiliary_loss(self):
        message = r"auxiliary_loss_level is 'grup'; expected 'group', 'batch' or 'global'"
        with self.assertRaisesRegex(ValueError, message):
            loops.make(TopKRouter, 4, auxiliary_loss_level="grup")


if __name__ == "__main__":
    testing.main()
