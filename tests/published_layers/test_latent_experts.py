"""Compares experts of smaller vectors with a loop over tokens in float64."""

import numpy as np
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.inference.layers import decoding_weights, infer
from lingvo_gshard.wings.published_layers.latent_experts import LatentExperts
from lingvo_gshard.wings.published_layers.routers import SigmoidRouter
from tests.layers.moe.routers.loops import top

B, L, M, H, E, K, LATENT, SHARED = 2, 5, 8, 6, 4, 2, 3, 7


def mixture():
    p = LatentExperts.params().set(
        model_dim=M,
        num_experts=E,
        hidden_dim=H,
        latent_dim=LATENT,
        shared_hidden_dim=SHARED,
        router=SigmoidRouter.params().set(k=K, normalize=True, auxiliary_loss_weight=0.0),
        dispatch=DroplessDispatch.params(),
    )
    p.experts.set(activation="squared_relu", use_bias=False)
    return p.instantiate(path="moe")


def feed_forward(x, w, prefix, *index):
    return np.maximum(x @ w[f"{prefix}.w_in"][index], 0) ** 2 @ w[f"{prefix}.w_out"][index]


def expected(x, w):
    """Returns the output for one token [M]."""
    scores = 1 / (1 + np.exp(-x @ w["router.w_gate"]))
    chosen, routed = top(scores, K), np.zeros(LATENT)
    for e in chosen:
        routed += scores[e] / scores[chosen].sum() * feed_forward(x @ w["w_down"], w, "experts", e)
    return routed @ w["w_up"] + feed_forward(x, w, "shared")


class LatentExpertsTest(testing.TestCase):
    def test_equals_a_loop_over_tokens(self):
        layer, rng = mixture(), np.random.default_rng(1)
        theta = layer.init(1)
        x = rng.normal(size=(B, L, M)).astype(np.float32)
        segments = tf.constant([[1] * L, [1] * 3 + [0] * 2])
        w = {n: np.asarray(v, np.float64) for n, v in theta.flatten_items()}
        found = layer.fprop(theta, tf.constant(x), segments).numpy()
        while_decoding = infer(layer, decoding_weights(layer, theta), tf.constant(x), segments)
        for b, i in ((b, i) for b in range(B) for i in range(L) if segments[b, i]):
            assert_close(found[b, i], expected(x[b, i].astype(np.float64), w), "float32")
            assert_close(while_decoding[b, i], found[b, i], "float32")

    def test_products_and_weights_are_counted(self):
        layer = mixture()
        around, own, shared = 2 * M * LATENT, 2 * LATENT * H, 2 * M * SHARED
        used = around + K * own + shared + M * E
        self.assertEqual(flops(layer, TokenShape(2, 7)), 2 * 2 * 7 * used)
        biases = sum(
            v.shape[0] for v in layer.router.variable_specs().flatten() if "bias" in v.path
        )
        self.assertEqual(active_parameters(layer), used + biases)
