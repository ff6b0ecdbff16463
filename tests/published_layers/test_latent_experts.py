"""Tests experts of a latent vector against a loop over tokens, and what devices exchange."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.routers import TopKRouter
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.inference.layers import infer
from lingvo_gshard.wings.published_layers.latent_experts import LatentExperts
from tests.layers.moe.routers.loops import top

B, L, M, H, E, K, LATENT = 2, 5, 8, 6, 4, 2, 3
SEGMENTS = tf.constant([[1] * L, [1] * 3 + [0] * 2])


def mixture(**values):
    p = LatentExperts.params().set(
        model_dim=M, hidden_dim=H, num_experts=E, latent_dim=LATENT, shared_hidden_dim=H + 1
    )
    p.set(router=TopKRouter.params().set(k=K), dispatch=DroplessDispatch.params())
    p.experts.activation = "squared_relu"
    return p.set(**values)


def layer_and_weights():
    layer, rng = mixture().instantiate(path="moe"), np.random.default_rng(1)
    draw = layer.init(1).transform(lambda w: w + (0.3 * rng.normal(size=w.shape)).astype("f4"))
    return layer, draw


def two_products(x, w, prefix, *index):
    w_in, w_out = (w[f"{prefix}.{name}"][index] for name in ("w_in", "w_out"))
    return np.maximum(x @ w_in, 0) ** 2 @ w_out


def expected(x, w):
    """Returns what the layer makes of one token [M]."""
    shares = np.exp(x @ w["router.w_gate"])
    shares /= shares.sum()
    chosen, latent = top(shares, K), x @ w["w_down"]
    parts = [shares[e] * two_products(latent, w, "experts", e) for e in chosen]
    routed = sum(parts) / shares[chosen].sum() @ w["w_up"]
    return routed + two_products(x, w, "shared")


@pytest.mark.parametrize("run", ["fprop", "infer"])
def test_equals_a_loop_over_tokens(run):
    layer, theta = layer_and_weights()
    x = np.random.default_rng(2).normal(size=(B, L, M)).astype(np.float32)
    w = {name: np.asarray(value, np.float64) for name, value in theta.flatten_items()}
    arguments = theta, tf.constant(x), SEGMENTS
    y = layer.fprop(*arguments) if run == "fprop" else infer(layer, *arguments)
    for b, i in ((b, i) for b in range(B) for i in range(L) if SEGMENTS[b, i]):
        assert_close(y[b, i], expected(x[b, i].astype(np.float64), w), "float32")


def test_facts_count_the_shared_products_and_the_experts_smaller_vectors():
    layer, _ = layer_and_weights()
    both, expert, shared, router = 2 * M * LATENT, 2 * LATENT * H, 2 * M * (H + 1), M * E
    assert flops(layer, TokenShape(B, L)) == 2 * B * L * (both + K * expert + shared + router)
    biases = sum(np.prod(v.shape) for v in layer.shared.variables.values()) - shared
    assert active_parameters(layer) == both + K * expert + shared + router + biases


def test_a_size_for_experts_alone_is_refused():
    p = mixture()
    p.experts.model_dim = M + 1
    with pytest.raises(UserError, match=r"moe.experts.model_dim: 9, but moe.model_dim is 8"):
        p.instantiate(path="moe")
    assert MixtureOfExperts.params().experts.model_dim == 0
