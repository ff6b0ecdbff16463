"""Compares Lion with the recurrence of its paper."""

import numpy as np
import pytest

from lingvo_gshard.wings.optimizers.lion import Lion
from tests.training.optim import one_weight


def numpy_lion(w, gradients, rates, beta1, beta2, decay):
    """Algorithm 2 of arXiv 2302.06675 in float64."""
    w = w.astype(np.float64)
    m = np.zeros_like(w)
    for g, rate in zip(gradients.astype(np.float64), rates, strict=True):
        c = beta1 * m + (1 - beta1) * g
        w = w - rate * (np.sign(c) + decay * w)
        m = beta2 * m + (1 - beta2) * g
    return w, m


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("layout", ["MH", "H"])
def test_follows_the_recurrence(layout, decay):
    start, gradients, rates = one_weight.draw(layout)
    optimizer = Lion(Lion.params().set(beta1=0.8, beta2=0.95, weight_decay=decay))
    weight, moments = one_weight.train(optimizer, one_weight.spec(layout), start, gradients, rates)
    expected_decay = decay if layout == "MH" else 0.0
    w, m = numpy_lion(start, gradients, rates, 0.8, 0.95, expected_decay)
    np.testing.assert_allclose(weight, w, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(moments.first_moment, m, rtol=2e-6, atol=1e-7)


def test_zero_gradient_changes_nothing():
    start, gradients, rates = one_weight.draw("MH", 2)
    optimizer = Lion(Lion.params())
    weight, _ = one_weight.train(optimizer, one_weight.spec("MH"), start, 0 * gradients, rates)
    np.testing.assert_array_equal(weight, start)
