"""Compares gradient descent with momentum with recurrences in NumPy."""

import numpy as np
import pytest

from lingvo_gshard.wings.optimizers.momentum import Momentum
from tests.training.optim import one_weight


def heavy_ball(w, gradients, rates, beta, decay):
    """Polyak's recurrence with decoupled decay, in float64."""
    w = w.astype(np.float64)
    m = np.zeros_like(w)
    for g, rate in zip(gradients.astype(np.float64), rates, strict=True):
        m = beta * m + g
        w = w - rate * (m + decay * w)
    return w


def looking_ahead(w, gradients, rate, beta):
    """Sutskever et al. 2013, equations 3 and 4: v the velocity, y the point ahead of theta.

    The trained weight is y, and gradients are taken at y. The learning rate is constant.
    """
    theta = w.astype(np.float64)
    v = np.zeros_like(theta)
    for g in gradients.astype(np.float64):
        v = beta * v - rate * g
        theta = theta + v
    return theta + beta * v


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("layout", ["MH", "H"])
@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_follows_the_recurrence(layout, beta, decay):
    start, gradients, rates = one_weight.draw(layout)
    optimizer = Momentum(Momentum.params().set(beta=beta, weight_decay=decay))
    weight, moments = one_weight.train(optimizer, one_weight.spec(layout), start, gradients, rates)
    expected = heavy_ball(start, gradients, rates, beta, decay if layout == "MH" else 0.0)
    np.testing.assert_allclose(weight, expected, rtol=2e-6, atol=1e-6)
    assert list(moments) == (["first_moment"] if beta else [])


def test_nesterov_moves_the_point_ahead():
    start, gradients, _ = one_weight.draw("MH")
    optimizer = Momentum(Momentum.params().set(beta=0.8, nesterov=True))
    weight, _ = one_weight.train(optimizer, one_weight.spec("MH"), start, gradients, [0.05] * 7)
    expected = looking_ahead(start, gradients, 0.05, 0.8)
    np.testing.assert_allclose(weight, expected, rtol=2e-6, atol=1e-6)
