# tests: wings/published_layers/mamba.py, wings/published_layers/state_space.py
# tests: wings/published_layers/recurrence.py
"""Tests Mamba2 against a loop over tokens in float64, with its cache, and packed."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.published_layers import state_space
from tests.layers.attention import attention_options
from tests.published_layers import recurrences

B, L, M, G, N, D, V = 2, 11, 8, 2, 2, 3, 5
SEGMENTS = np.array([[1] * 4 + [2] * 6 + [0], [1] * 11], np.int32)
X = np.random.default_rng(1).normal(size=(B, L, M)).astype(np.float32)


def make(**values) -> tuple:
    layer = attention_options.mamba(**values).instantiate(path="mamba")
    rng = np.random.default_rng(2)
    theta = layer.init(1).transform(lambda w: w + (0.4 * rng.normal(size=w.shape)).astype("f4"))
    return layer, theta


def silu(x):
    return x / (1 + np.exp(-x))


def state_loop(query, key, value, log_decay) -> np.ndarray:
    """Returns the values [L,d] that one head reads; arXiv 2405.21060, equation 1 with scalars."""
    state, read = np.zeros((key.shape[-1], value.shape[-1])), []
    for q, k, v, g in zip(query, key, value, log_decay, strict=True):
        state = np.exp(g) * state + np.outer(k, v)
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
        sums = np.array([(padded[i : i + len(taps)] * taps).sum(0) for i in range(len(x))])
        return silu(sums + w[f"b_{name}"][head] if p.use_convolution_bias else sums)

    for g in range(G):
        read = []
        for n in range(N):
            step = np.log1p(np.exp(x @ w["w_step"][:, g, n] + w["b_step"][g, n]))
            value = convolved("value", g, n)
            one = state_loop(
                convolved("query", g),
                convolved("key", g),
                value * step[:, None],
                -np.exp(w["log_rate"][g, n]) * step,
            )
            one += value * w["skip"][g, n]
            read.append(one * silu(x @ w["w_gate"][:, g, n]))
        read = np.stack(read, 1)
        read /= np.sqrt((read**2).mean((1, 2), keepdims=True) + p.epsilon)
        y += np.einsum("lnd,ndm->lm", read * w["scale"][g], w["w_out"][g])
    return y


class Mamba2Test(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters((1, True), (4, False), (64, True))
    def test_matches_a_loop_over_tokens(self, chunk_size, use_convolution_bias):
        layer, theta = make(chunk_size=chunk_size, use_convolution_bias=use_convolution_bias)
        run = tf.function(layer.fprop, jit_compile=True)
        y = run(theta, tf.constant(X), layer.mask(tf.constant(SEGMENTS))).numpy()
        for row, segment in ((0, 1), (0, 2), (1, 1)):
            chosen = SEGMENTS[row] == segment
            assert_close(y[row, chosen], reference(layer.p, theta, X[row, chosen]), "float32")

    @parameterized.parameters(1, 3, 11)
    def test_chunks_are_single_steps_with_their_gradients(self, size):
        rng = np.random.default_rng(3)
        arrays = [rng.normal(size=(B, L, G, D)) for _ in range(2)]
        arrays += [rng.normal(size=(B, L, G, N, V)), -rng.exponential(size=(B, L, G, N))]
        starts = np.zeros((B, L), bool)
        starts[:, 0] = starts[0, 5] = starts[0, 6] = True
        recurrences.check_chunks(state_space, arrays, starts, size)

    def test_fast_forgetting_does_not_overflow(self):
        """A decay of exp(-1000) a token leaves nothing, and its inverse would be infinite."""
        ones = tf.ones([1, L, 1, 1])
        inputs = state_space.Inputs(ones, ones, ones[..., None], -1000.0 * ones)
        read, state = state_space.run_rows(inputs, tf.constant([[True] + [False] * (L - 1)]), 4)
        self.assertAllEqual(read, tf.ones([1, L, 1, 1, 1]))
        self.assertAllEqual(state, tf.ones([1, 1, 1, 1, 1]))

    def test_a_cache_gives_the_same_token_by_token(self):
        recurrences.check_cache(*make(), X)

    def test_a_new_text_does_not_see_the_last_one(self):
        recurrences.check_new_text(*make(), X)

    def test_a_stack_must_be_causal(self):
        with self.assertRaisesRegex(UserError, "Mamba2 needs a causal stack"):
            make(is_causal=False)

    def test_counts_its_operations(self):
        layer, _ = make(chunk_size=4)
        features = G * (N * V + 2 * D)
        products = M * (features + 2 * G * N * V + G * N)
        states = G * 4 * D + G * N * (4 * V + 2 * D * V)
        counted = flops(layer, TokenShape(B, L))
        self.assertEqual(counted, 2 * B * L * (products + 4 * features + states))
