"""Compares Adam with the recurrence of its paper."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.moments import decayed_mean
from tests.training.optim import one_weight


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


@pytest.mark.parametrize("beta2", [0.98, 0.999, 0.99999, 0.9999999])
def test_bias_corrections_do_not_cancel(beta2):
    start, gradients, rates = one_weight.draw("MH", 5)
    optimizer = Adam(Adam.params().set(beta1=0.999, beta2=beta2))
    weight, moments = one_weight.train(
        optimizer, one_weight.spec("MH"), np.zeros_like(start), gradients, rates
    )
    w, m, v = numpy_adam(np.zeros_like(start), gradients, rates, 0.999, beta2, 1e-9, 0.0)
    np.testing.assert_allclose(weight, w, rtol=5e-6, atol=1e-7)
    np.testing.assert_allclose(moments["first_moment"], m, rtol=5e-6, atol=1e-9)
    np.testing.assert_allclose(moments["second_moment"], v, rtol=2e-6)


def test_a_long_mean_converges_to_the_constant_that_it_averages():
    value, steps = tf.constant(3.0), 200_000

    def step(index: tf.Tensor, old: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return index + 1, decayed_mean(old, value, 0.99999)

    @tf.function
    def mean() -> tf.Tensor:
        return tf.while_loop(lambda index, _: index < steps, step, (0, 0.0))[1]

    np.testing.assert_allclose(mean(), 3.0 * -np.expm1(steps * np.log(0.99999)), rtol=2e-4)


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
