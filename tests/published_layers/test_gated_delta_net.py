# tests: wings/published_layers/gated_delta_net.py, wings/published_layers/delta_rule.py
# tests: wings/inference/layers/cached.py
"""Tests gated delta nets against loops over tokens in float64, with their cache, and packed."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import extend, state_shapes
from lingvo_gshard.wings.published_layers import delta_rule
from tests.layers.attention import attention_options
from tests.published_layers import recurrences

B, L, M, N, R, D, V = 2, 11, 8, 2, 2, 3, 5
SEGMENTS = np.array([[1] * 4 + [2] * 6 + [0], [1] * 11], np.int32)
X = np.random.default_rng(1).normal(size=(B, L, M)).astype(np.float32)


def make(**values) -> tuple:
    layer = attention_options.delta_net(**values).instantiate(path="net")
    rng = np.random.default_rng(2)
    theta = layer.init(1).transform(lambda w: w + (0.4 * rng.normal(size=w.shape)).astype("f4"))
    return layer, theta


def silu(x):
    return x / (1 + np.exp(-x))


def delta_loop(query, key, value, log_decay, strength) -> np.ndarray:
    """Returns the values [L,d] that one head reads; arXiv 2412.06464, equation 10."""
    state = np.zeros((key.shape[-1], value.shape[-1]))
    read = []
    for q, k, v, g, b in zip(query, key, value, log_decay, strength, strict=True):
        state = np.exp(g) * (np.eye(len(k)) - b * np.outer(k, k)) @ state + b * np.outer(k, v)
        read.append(state.T @ q)
    return np.array(read)


def reference(p, theta, x) -> np.ndarray:
    """Returns the output of one text [L,M]."""
    w = {name: np.asarray(value, np.float64) for name, value in theta.flatten_items()}
    x, y = x.astype(np.float64), np.zeros(x.shape)

    def convolved(name, *head):
        inputs = x @ w[f"w_{name}"][(slice(None), *head)]
        taps = w[f"w_{name}_taps"][(slice(None), *head)]
        padded = np.concatenate([np.zeros((len(taps) - 1, inputs.shape[1])), inputs])
        return silu(np.array([(padded[i : i + len(taps)] * taps).sum(0) for i in range(len(x))]))

    for n in range(N):
        query, key = (convolved(name, n) for name in ("query", "key"))
        query, key = (v / np.sqrt((v**2).sum(-1, keepdims=True) + 1e-6) for v in (query, key))
        for r in range(R):
            strength = 1 / (1 + np.exp(-(x @ w["w_strength"][:, n, r])))
            rate = np.log1p(np.exp(x @ w["w_decay"][:, n, r] + w["b_decay"][n, r]))
            log_decay = -np.exp(w["log_rate"][n, r]) * rate
            value = convolved("value", n, r)
            read = delta_loop(query / np.sqrt(D), key, value, log_decay, strength)
            read /= np.sqrt((read**2).mean(-1, keepdims=True) + p.output_norm.epsilon)
            read *= w["output_norm.scale"] * silu(x @ w["w_gate"][:, n, r])
            y += read @ w["w_out"][n, r]
    return y


class GatedDeltaNetTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(1, 4, 64)
    def test_matches_a_loop_over_tokens(self, chunk_size):
        layer, theta = make(chunk_size=chunk_size)
        run = tf.function(layer.fprop, jit_compile=True)
        y = run(theta, tf.constant(X), layer.mask(tf.constant(SEGMENTS))).numpy()
        for row, segment in ((0, 1), (0, 2), (1, 1)):
            chosen = SEGMENTS[row] == segment
            assert_close(y[row, chosen], reference(layer.p, theta, X[row, chosen]), "float32")

    def test_chunks_are_single_steps_with_their_gradients(self):
        rng = np.random.default_rng(3)
        arrays = [rng.normal(size=(B, L, N, D)) for _ in range(2)]
        arrays[1] /= np.linalg.norm(arrays[1], axis=-1, keepdims=True)
        arrays += [rng.normal(size=(B, L, N, R, V)), -rng.exponential(size=(B, L, N, R))]
        arrays.append(rng.uniform(size=(B, L, N, R)))
        recurrences.check_chunks(delta_rule, arrays, np.arange(L)[None] == [[0], [0]], 4)

    def test_a_cache_gives_the_same_token_by_token(self):
        recurrences.check_cache(*make(), X)

    def test_a_new_text_does_not_see_the_last_one(self):
        recurrences.check_new_text(*make(), X)

    def test_a_beam_is_refused(self):
        layer, theta = make()
        cache = NestedMap({n: tf.zeros(s) for n, s in state_shapes(layer, B, L).items()})
        with self.assertRaisesRegex(UserError, "beam_size=1 was expected"):
            extend(layer, theta, tf.constant(X[:, :3]), recurrences.view(np.ones(2)), None, cache)

    def test_a_stack_must_be_causal(self):
        with self.assertRaisesRegex(UserError, "needs a causal stack"):
            make(is_causal=False)

    def test_counts_its_operations(self):
        layer, _ = make(chunk_size=4)
        features = 2 * D + 2 * R * V + 2 * R
        products = M * (features + R * V) + 4 * (2 * D + R * V)
        rule = 2 * 4 * D + R * (4 * (D + 2 * V) + 4 * D * V)
        self.assertEqual(flops(layer, TokenShape(B, L)), 2 * B * L * N * (products + rule))
