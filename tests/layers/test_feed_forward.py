# tests: layers/feed_forward.py, wings/inference/layers/stored.py
"""Compares the feed-forward layer and its activations with NumPy."""

import math

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.testing.layers import assert_close

M, H = 4, 6

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


def make(**values):
    params = FeedForward.params().set(model_dim=M, hidden_dim=H, **values)
    layer = params.instantiate(path="encoder.feed_forward")
    rng = np.random.default_rng(1)
    theta = layer.init(1).transform(lambda w: tf.constant(rng.normal(size=w.shape), tf.float32))
    return layer, theta


X = np.random.default_rng(2).normal(size=(2, 3, M)).astype(np.float32)
MASK = tf.ones([2, 3])


class FeedForwardTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(activation=tuple(ACTIVATIONS), use_bias=[True, False])
    def test_matches_the_formula(self, activation, use_bias):
        layer, theta = make(activation=activation, use_bias=use_bias)
        self.assertEqual(set(theta), {"w_in", "w_out"} | ({"b_in", "b_out"} if use_bias else set()))
        weights = {name: w.numpy().astype(np.float64) for name, w in theta.items()}
        hidden = ACTIVATIONS[activation](X @ weights["w_in"] + weights.get("b_in", 0))
        expected = hidden @ weights["w_out"] + weights.get("b_out", 0)
        assert_close(layer.fprop(theta, tf.constant(X), MASK), expected, "float32")

    @parameterized.parameters(1.0, 0.0)
    def test_clamped_swiglu_matches_the_formula(self, offset):
        limits = {"gate_alpha": 1.5, "gate_limit": 0.8, "gate_offset": offset}
        layer, theta = make(activation="clamped_swiglu", **limits)
        weights = {name: w.numpy().astype(np.float64) for name, w in theta.items()}
        h, factor = (X @ weights[f"w_{n}"] + weights[f"b_{n}"] for n in ("in", "factor"))
        self.assertTrue((h > 0.8).any())
        self.assertTrue((factor < -0.8).any())
        self.assertTrue((factor > 0.8).any())
        h, factor = np.minimum(h, 0.8), np.clip(factor, -0.8, 0.8)
        hidden = (factor + offset) * h / (1 + np.exp(-1.5 * h))
        expected = hidden @ weights["w_out"] + weights["b_out"]
        assert_close(layer.fprop(theta, tf.constant(X), MASK), expected, "float32")

    def test_an_option_that_the_activation_does_not_read_is_refused(self):
        with self.assertRaisesRegex(
            ValueError, "feed_forward.gate_limit: 2.0 with .*activation='swiglu'"
        ):
            make(activation="swiglu", gate_limit=2.0)

    def test_bfloat16_activations_keep_their_type(self):
        layer, theta = make()
        y = layer.fprop(theta, tf.cast(X, tf.bfloat16), MASK)
        self.assertEqual(y.dtype, tf.bfloat16)
        exact = layer.fprop(theta, tf.constant(X), MASK)
        assert_close(tf.cast(y, tf.float32), exact, "bfloat16")

    def test_an_unknown_activation_is_refused(self):
        with self.assertRaisesRegex(ValueError, "activation is 'rely'; expected 'relu', "):
            make(activation="rely")


if __name__ == "__main__":
    testing.main()
