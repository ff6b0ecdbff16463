"""Compares scaling laws with numbers of their papers that the coefficients do not appear in."""

import numpy as np
import pytest

from lingvo_gshard.wings.planning.training.budget import laws
from lingvo_gshard.wings.planning.training.budget.laws import Experts, Shapes


def models(experts, active=1e9, total=None):
    """Returns one model of a size, without embeddings."""
    active = np.atleast_1d(np.asarray(active, float))
    total = active if total is None else np.atleast_1d(np.asarray(total, float))
    return Shapes(experts, np.ones_like(active), active, total, active, total, 6 * active)


@pytest.mark.parametrize(
    ("expansion", "size", "size_power", "data", "data_power"),
    [
        (1, 30.3640, -0.1817, 53.9838, -0.1965),
        (2, 27.7982, -0.1780, 66.8401, -0.2065),
        (4, 24.8462, -0.1731, 87.7022, -0.2192),
        (8, 21.8330, -0.1676, 119.9126, -0.2338),
        (16, 19.0159, -0.1617, 167.5073, -0.2494),
        (32, 16.5424, -0.1557, 234.6726, -0.2652),
    ],
)
def test_joint_law_reduces_to_its_table_4(expansion, size, size_power, data, data_power):
    active, tokens = np.array([1e8, 1e9, 1e10, 1e10]), np.array([1e9, 1e11, 1e11, 1e13])
    expected = size * active**size_power + data * tokens**data_power + 1.3637
    found = laws.joint_loss(models(Experts(expansion), active), tokens)
    np.testing.assert_allclose(found, expected, rtol=2e-3)


@pytest.mark.parametrize(
    ("active", "tokens", "granularity", "loss"),
    [
        (1e8, 4.37e9, 8, 3.133),
        (1e9, 28.94e9, 16, 2.491),
        (3e9, 72.90e9, 16, 2.245),
        (7e9, 137.60e9, 32, 2.076),
        (70e9, 941.07e9, 32, 1.694),
        (300e9, 2.96e12, 64, 1.503),
        (1e12, 7.94e12, 64, 1.367),
    ],
)
def test_fine_grained_law_gives_the_losses_of_its_table_2(active, tokens, granularity, loss):
    # Section 6.1: N = (8 E + 4) M^2 for each layer, of which 12 M^2 are active.
    one = models(Experts(64, granularity), active, active * (8 * 64 + 4) / 12)
    found = laws.fine_grained_loss(one, np.array([tokens]))
    np.testing.assert_allclose(found, loss, rtol=0.01)


def test_effective_parameters_are_those_of_clark_et_al():
    # Section 5.1: 5 million weights with 128 experts are worth about 55 million dense ones.
    assert laws.effective_parameters(np.array(5e6), 128) == pytest.approx(55e6, rel=0.1)
    assert laws.effective_parameters(np.array(1e9), 1) == pytest.approx(1e9)
    # Section 5.2: from about 937 billion weights on, experts are worth nothing. The published
    # coefficients are rounded.
    assert laws.effective_parameters(np.array(1e12), 256) == pytest.approx(1e12, rel=0.05)


def test_dense_models_of_the_routed_law_are_those_of_hoffmann_et_al():
    # 5.76e23 FLOPs, the budget of Gopher: about 40 billion weights (table 3, approach 3).
    active = np.geomspace(1e9, 1e12, 2001)
    losses = laws.routed_loss(models(Experts(1), active), 5.76e23 / (6 * active))
    assert active[np.argmin(losses)] == pytest.approx(40e9, rel=0.2)


@pytest.mark.parametrize("law", laws.LAWS.values(), ids=lambda law: law.name)
def test_loss_falls_with_size_tokens_and_experts(law):
    size, tokens = np.array([1e9, 2e9]), np.array([1e12, 1e12])
    previous = np.full(2, np.inf)
    for experts in law.experts:
        one = models(experts, size, size * experts.expansion)
        loss = law.loss(one, tokens)
        assert loss[1] < loss[0] and (law.loss(one, 2 * tokens) < loss).all()
        assert (loss < previous + 0.005).all()
        previous = loss


def test_shapes_count_the_weights_of_their_paper():
    # Appendix E: 16 layers of 1,024 with 32 experts have 5.0B weights, 321M of them active.
    found = laws.shapes(Experts(32))
    index = list(found.layers).index(16)
    assert found.active[index] == pytest.approx(321e6, rel=0.01)
    assert found.total[index] == pytest.approx(5.0e9, rel=0.01)


def test_unknown_laws_are_refused():
    with pytest.raises(ValueError, match="`law=join`: unknown scaling law.*Did you mean 'joint'"):
        laws.get("join")
