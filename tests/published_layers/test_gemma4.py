"""Compares Gemma 4's layers with experts with loops over tokens in float64."""

import math

import numpy as np
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.published_layers.gemma4 import (
    ExpertsBeside,
    NormalizedRouter,
    ScaledLayer,
)
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from tests.layers.moe.routers.loops import top

B, L, M, H, E, K = 2, 5, 8, 6, 4, 2
EPSILON = 0.1


def mixture(**values):
    """Returns the Params of experts beside a feed-forward layer."""
    norm = RMSNorm.params().set(epsilon=EPSILON)
    p = ExpertsBeside.params().set(
        num_experts=E,
        hidden_dim=H,
        shared_hidden_dim=H + 1,
        norm=norm,
        router=NormalizedRouter.params().set(k=K, norm=norm.copy()),
        dispatch=DroplessDispatch.params(),
    )
    p.experts.activation = "geglu_tanh"
    return p.set(**values)


def layer_of(position="both"):
    """Returns a layer and weights that differ from their initial values."""
    p = ScaledLayer.params().set(model_dim=M, norm_position=position, feed_forward=mixture())
    p.norm = RMSNorm.params().set(epsilon=EPSILON)
    p.self_attention = PublishedAttention.params().set(num_heads=2, is_causal=True)
    layer, rng = p.instantiate(path="layer"), np.random.default_rng(1)
    theta = layer.init(1).transform(lambda w: w + (0.3 * rng.normal(size=w.shape)).astype("f4"))
    return layer, theta


def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def gated(x, w, prefix, *index):
    """Returns a feed-forward layer with GELU as tanh computes it."""
    w_in, factor, out = (w[f"{prefix}.{name}"][index] for name in ("w_in", "w_factor", "w_out"))
    h = x @ w_in
    gelu = h / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return gelu * (x @ factor) @ out


def expected(x, w):
    """Returns what the feed-forward layer and the factor make of one token [M]."""
    logits = norm(x, w["router.norm.scale"]) / math.sqrt(M) @ w["router.w_gate"]
    shares = np.exp(logits) / np.exp(logits).sum()
    chosen = top(shares, K)
    token, routed = norm(x, w["expert_norm.scale"]), np.zeros(M)
    for e in chosen:
        gate = shares[e] / shares[chosen].sum() * w["router.gate_scale"][e]
        routed += gate * gated(token, w, "experts", e)
    plain = gated(norm(x, w["shared_norm.scale"]), w, "shared")
    return norm(routed, w["expert_output_norm.scale"]) + norm(plain, w["shared_output_norm.scale"])


class ExpertsBesideTest(testing.TestCase):
    def test_equals_a_loop_over_tokens(self):
        layer, theta = layer_of()
        self.assertNotIn("feed_forward_norm", layer.children)
        rng = np.random.default_rng(2)
        x = rng.normal(size=(B, L, M)).astype(np.float32)
        segments = tf.constant([[1] * L, [1] * 3 + [0] * 2])
        w = {n: np.asarray(v, np.float64) for n, v in theta.feed_forward.flatten_items()}
        h = layer.feed_forward.fprop(theta.feed_forward, tf.constant(x), segments).numpy()
        masks = [layer.self_attention.mask(segments)]
        y = layer.fprop(theta, tf.constant(x), masks).numpy()
        entered = layer.enter("self_attention", theta, tf.constant(x))
        attended = layer.self_attention.fprop(theta.self_attention, entered, masks[0])
        middle = layer.add("self_attention", theta, tf.constant(x), attended).numpy()
        scale = theta.feed_forward_output_norm.scale.numpy()
        for b, i in ((b, i) for b in range(B) for i in range(L) if segments[b, i]):
            assert_close(h[b, i], expected(x[b, i].astype(np.float64), w), "float32")
            token = middle[b, i].astype(np.float64)
            whole = (token + norm(expected(token, w), scale)) * theta.output_scale.numpy()
            assert_close(y[b, i], whole, "float32")

    def test_the_factor_of_the_output_is_not_trained(self):
        layer, _ = layer_of("before")
        frozen = [s.path for s in layer.variable_specs().flatten() if s.is_frozen]
        self.assertEqual(frozen, ["layer.output_scale"])

    def test_options_that_would_have_no_effect_are_refused(self):
        for values in ({"shared_hidden_dim": 0}, {"shared_combination": "gated"}):
            with self.assertRaisesRegex(UserError, "moe.shared_hidden_dim: .*'sum' were expected"):
                mixture(model_dim=M, **values).instantiate(path="moe")
        attention = PublishedAttention.params().set(model_dim=M, num_heads=2)
        with self.assertRaisesRegex(UserError, "x.value_dim: 3 with .*x.head_dim, 4, was expected"):
            attention.copy().set(value_dim=3, has_value_weight=False).instantiate(path="x")

    def test_a_product_less_is_counted_without_a_value_weight(self):
        shape = TokenShape(2, 7)
        p = PublishedAttention.params().set(model_dim=M, num_heads=2, is_causal=True)
        whole, less = (
            flops(p.copy().set(has_value_weight=has).instantiate(path="x"), shape)
            for has in (True, False)
        )
        self.assertEqual(whole - less, 2 * 2 * 7 * M * M)
