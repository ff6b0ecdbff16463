"""Compares Adam with the recurrence of its paper."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.optim.adam import Adam


def numpy_adam(weights, gradients, rates, beta1, beta2, epsilon, decay):
    """Algorithm 1 of arXiv 1412.6980 with its bias corrections spelled out, in float64."""
    w = weights.astype(np.float64)
    m = v = np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        w = w - rate * m_hat / (np.sqrt(v_hat) + epsilon) - rate * decay * w
    return w, m, v


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("layout", ["MH", "H"])
def test_follows_the_recurrence(layout, decay):
    generator = np.random.default_rng(0)
    shape = {"MH": (3, 4), "H": (4,)}[layout]
    start = generator.normal(size=shape).astype(np.float32)
    gradients = generator.normal(size=(7, *shape)).astype(np.float32)
    rates = np.linspace(0.1, 0.02, 7).astype(np.float32)
    optimizer = Adam(Adam.params().set(weight_decay=decay, epsilon=1e-6))
    spec = VariableSpec("w", layout, shape, "float32", initializers.constant(0.0))
    specs, theta = NestedMap(w=spec), NestedMap(w=tf.constant(start))
    moments = optimizer.moment_specs(specs).transform(lambda s: s.init(tf.constant([0, 0])))
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        theta, moments = optimizer.update(
            specs, theta, NestedMap(w=tf.constant(gradient)), moments, tf.constant(step), rate
        )
    # Biases and norm scales, which are vectors, do not decay.
    expected_decay = decay if layout == "MH" else 0.0
    w, m, v = numpy_adam(start, gradients, rates, 0.9, 0.98, 1e-6, expected_decay)
    np.testing.assert_allclose(theta.w, w, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(moments.w.first_moment, m, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(moments.w.second_moment, v, rtol=2e-6, atol=1e-7)


def test_moments_follow_the_weight():
    spec = VariableSpec("a.w", "EMH", (2, 3, 4), "bfloat16", initializers.normal(1.0))
    moments = Adam(Adam.params()).moment_specs(NestedMap(w=spec)).w
    for name in ("first_moment", "second_moment"):
        assert (moments[name].layout, moments[name].shape) == ("EMH", (2, 3, 4))
        assert moments[name].dtype == "float32"
        assert moments[name].path == f"a.w/{name}"


def test_low_precision_weights_are_updated_in_float32():
    spec = VariableSpec("w", "M", (4,), "bfloat16", initializers.constant(1.0))
    specs, theta = NestedMap(w=spec), NestedMap(w=tf.ones([4], tf.bfloat16))
    optimizer = Adam(Adam.params())
    moments = optimizer.moment_specs(specs).transform(lambda s: s.init(tf.constant([0, 0])))
    gradient = NestedMap(w=tf.fill([4], tf.constant(1e-3, tf.bfloat16)))
    theta, moments = optimizer.update(specs, theta, gradient, moments, tf.constant(0), 0.25)
    assert theta.w.dtype == tf.bfloat16
    assert moments.w.second_moment.dtype == tf.float32
    np.testing.assert_allclose(tf.cast(theta.w, tf.float32), 0.75, rtol=1e-2)
