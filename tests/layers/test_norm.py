"""Compares normalizations with their formulas, and tests their invariances."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.norm import LayerNorm, RMSNorm
from lingvo_gshard.testing.layers import assert_close

M = 6


def make(cls, **values):
    layer = cls.params().set(model_dim=M, **values).instantiate(path="norm")
    rng = np.random.default_rng(1)
    theta = layer.init(1).transform(lambda w: tf.constant(rng.normal(size=w.shape), tf.float32))
    return layer, theta


def activations(*shape: int) -> np.ndarray:
    return (3 + 2 * np.random.default_rng(2).normal(size=(*shape, M))).astype(np.float32)


class NormTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(1e-6, 0.5)
    def test_layer_norm_matches_the_formula(self, epsilon):
        layer, theta = make(LayerNorm, epsilon=epsilon)
        x = activations(2, 3)
        exact = x.astype(np.float64)
        normalized = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(
            exact.var(-1, keepdims=True) + epsilon
        )
        expected = normalized * theta.scale.numpy() + theta.bias.numpy()
        assert_close(layer.fprop(theta, tf.constant(x)), expected, "float32")

    def test_a_layer_norm_without_bias_adds_none(self):
        layer, theta = make(LayerNorm, use_bias=False)
        self.assertEqual(list(theta), ["scale"])
        other, full = make(LayerNorm)
        full = NestedMap(full, scale=theta.scale, bias=tf.zeros_like(theta.scale))
        x = tf.constant(activations(2, 3))
        assert_close(layer.fprop(theta, x), other.fprop(full, x), "order")

    @parameterized.parameters(1e-6, 0.5)
    def test_rms_norm_matches_the_formula(self, epsilon):
        layer, theta = make(RMSNorm, epsilon=epsilon)
        x = activations(2, 3)
        exact = x.astype(np.float64)
        expected = (
            exact / np.sqrt((exact**2).mean(-1, keepdims=True) + epsilon) * theta.scale.numpy()
        )
        assert_close(layer.fprop(theta, tf.constant(x)), expected, "float32")

    def test_a_zero_centered_weight_is_the_scale_minus_one(self):
        layer, theta = make(RMSNorm, zero_centered=True)
        self.assertAllEqual(layer.init(1).scale, np.zeros(M))
        plain, _ = make(RMSNorm)
        x = tf.constant(activations(2, 3))
        expected = plain.fprop(theta.transform(lambda w: w + 1.0), x)
        assert_close(layer.fprop(theta, x), expected, "order")

    def test_layer_norm_subtracts_the_mean(self):
        layer, theta = make(LayerNorm)
        x = activations(4)
        shifted = layer.fprop(theta, tf.constant(x + 10))
        assert_close(shifted, layer.fprop(theta, tf.constant(x)), "order")

    def test_layer_norm_is_exact_far_from_zero(self):
        layer, theta = make(LayerNorm)
        x = np.array([[1000.0, 1001.0, 1002.0, 1003.0, 1004.0, 1005.0]], np.float32)
        near = layer.fprop(theta, tf.constant(x - 1000))
        assert_close(layer.fprop(theta, tf.constant(x)), near, "order")

    @parameterized.parameters(LayerNorm, RMSNorm)
    def test_scale_of_the_input_does_not_matter(self, cls):
        layer, theta = make(cls)
        x = activations(4)
        assert_close(layer.fprop(theta, 8 * x), layer.fprop(theta, tf.constant(x)), "order")

    @parameterized.parameters(LayerNorm, RMSNorm)
    def test_bfloat16_is_rounded_once_at_the_end(self, cls):
        layer, theta = make(cls)
        x = tf.cast(activations(4), tf.bfloat16)
        y = layer.fprop(theta, x)
        self.assertEqual(y.dtype, tf.bfloat16)
        expected = tf.cast(layer.fprop(theta, tf.cast(x, tf.float32)), tf.bfloat16)
        self.assertAllEqual(y, expected)


if __name__ == "__main__":
    testing.main()
