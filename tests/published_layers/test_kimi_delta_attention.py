# tests: wings/published_layers/kimi_delta_attention.py
# tests: wings/published_layers/channel_delta_rule.py
"""Tests Kimi Delta Attention against a loop over tokens in float64, with its cache, and packed."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.published_layers import channel_delta_rule
from tests.layers.attention import attention_options
from tests.published_layers import recurrences

B, L, M, N, R, D, V, K = 2, 11, 8, 2, 2, 3, 5, 4
SEGMENTS = np.array([[1] * 4 + [2] * 6 + [0], [1] * 11], np.int32)
X = np.random.default_rng(1).normal(size=(B, L, M)).astype(np.float32)


def make(**values) -> tuple:
    layer = attention_options.kimi(**values).instantiate(path="kimi")
    rng = np.random.default_rng(2)
    theta = layer.init(1).transform(lambda w: w + (0.4 * rng.normal(size=w.shape)).astype("f4"))
    return layer, theta


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def channel_loop(query, key, value, log_decay, strength) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values [L,d] that one head reads, and its state; arXiv 2510.26692, equation 1."""
    state = np.zeros((key.shape[-1], value.shape[-1]))
    read = []
    for q, k, v, g, b in zip(query, key, value, log_decay, strength, strict=True):
        state = (np.eye(len(k)) - b * np.outer(k, k)) @ np.diag(np.exp(g)) @ state
        state += b * np.outer(k, v)
        read.append(state.T @ q)
    return np.array(read), state


def reference(p, theta, x) -> np.ndarray:
    """Returns the output of one text [L,M]."""
    w = {name: np.asarray(value, np.float64) for name, value in theta.flatten_items()}
    x, y = x.astype(np.float64), np.zeros(x.shape)

    def convolved(name, *head):
        inputs = x @ w[f"w_{name}"][(slice(None), *head)]
        taps = w[f"w_{name}_taps"][(slice(None), *head)]
        padded = np.concatenate([np.zeros((len(taps) - 1, inputs.shape[1])), inputs])
        sums = np.array([(padded[i : i + len(taps)] * taps).sum(0) for i in range(len(x))])
        return sums * sigmoid(sums)

    for n in range(N):
        query, key = (convolved(name, n) for name in ("query", "key"))
        query, key = (v / np.sqrt((v**2).sum(-1, keepdims=True) + 1e-6) for v in (query, key))
        decay = x @ w["w_decay_down"] @ w["w_decay"][:, n] + w["b_decay"][n]
        log_decay = -np.exp(w["log_rate"][n]) * np.log1p(np.exp(decay))
        for r in range(R):
            strength = sigmoid(x @ w["w_strength"][:, n, r])
            value = convolved("value", n, r)
            read, _ = channel_loop(query / np.sqrt(D), key, value, log_decay, strength)
            read /= np.sqrt((read**2).mean(-1, keepdims=True) + p.output_norm.epsilon)
            gate = x @ w["w_gate_down"] @ w["w_gate"][:, n, r]
            y += read * w["output_norm.scale"] * sigmoid(gate) @ w["w_out"][n, r]
    return y


class KimiDeltaAttentionTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(1, 4, 64)
    def test_matches_a_loop_over_tokens(self, chunk_size):
        layer, theta = make(chunk_size=chunk_size)
        run = tf.function(layer.fprop, jit_compile=True)
        y = run(theta, tf.constant(X), layer.mask(tf.constant(SEGMENTS))).numpy()
        for row, segment in ((0, 1), (0, 2), (1, 1)):
            chosen = SEGMENTS[row] == segment
            assert_close(y[row, chosen], reference(layer.p, theta, X[row, chosen]), "float32")

    @parameterized.parameters(
        # Sums of logarithms in a chunk: about -20 and -500, and channels that differ.
        (64, 0.3), (37, 15.0), (40, (0.001, 1.0, 30.0)),
    )  # fmt: skip
    def test_chunks_of_many_blocks_are_a_loop_at_any_decay(self, size, rate):
        rng, length = np.random.default_rng(4), 101
        query, key = rng.normal(size=(2, length, D))
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        value, strength = rng.normal(size=(length, V)), rng.uniform(size=length)
        log_decay = -np.array(rate) * rng.exponential(size=(length, D))
        arrays = [query, key, value[:, None], log_decay, strength[:, None]]
        inputs = [tf.constant(x[None, :, None], tf.float32) for x in arrays]
        starts = np.zeros((1, length), bool)
        starts[:, [0, 50, 53]] = True

        @tf.function(jit_compile=True)
        def run(*inputs):
            found = channel_delta_rule.Inputs(*inputs)
            return channel_delta_rule.run_rows(found, tf.constant(starts), size)

        with tf.GradientTape() as tape:
            tape.watch(inputs)
            read, state = run(*inputs)
            loss = tf.reduce_sum(tf.sin(read)) + tf.reduce_sum(state)
        for gradient in tape.gradient(loss, inputs):
            self.assertTrue(np.isfinite(gradient).all())
        for start, stop in ((0, 50), (50, 53), (53, length)):
            text = [np.float32(x[start:stop]).astype(np.float64) for x in arrays]
            expected, last = channel_loop(*text[:2], text[2][:, 0], text[3], text[4][:, 0])
            assert_close(read[0, start:stop, 0, 0].numpy(), expected, "float32")
        assert_close(state[0, 0, 0].numpy(), last, "float32")

    def test_fast_forgetting_does_not_overflow(self):
        """A decay of exp(-1000) a token leaves nothing, and its inverse would be infinite."""
        ones = tf.ones([1, 40, 1, 1])
        inputs = [ones, tf.identity(ones), ones[..., None], -1000.0 * ones, 0.5 * ones]
        starts = tf.constant([[True] + [False] * 39])
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            read, state = channel_delta_rule.run_rows(
                channel_delta_rule.Inputs(*inputs), starts, 32
            )
            loss = tf.reduce_sum(read)
        self.assertAllEqual(read, 0.5 * tf.ones([1, 40, 1, 1, 1]))
        self.assertAllEqual(state, 0.5 * tf.ones([1, 1, 1, 1, 1]))
        # Only a token's own write is read.
        expected = [0.5 * ones, 0.5 * ones, 0.5 * ones[..., None], 0.0 * ones, ones]
        for found, value in zip(tape.gradient(loss, inputs), expected, strict=True):
            self.assertAllEqual(found, value)

    @parameterized.parameters(4, 64)
    def test_chunks_are_single_steps_with_their_gradients(self, size):
        rng, length = np.random.default_rng(3), 37
        arrays = [rng.normal(size=(B, length, N, D)) for _ in range(2)]
        arrays[1] /= np.linalg.norm(arrays[1], axis=-1, keepdims=True)
        arrays += [rng.normal(size=(B, length, N, R, V)), -rng.exponential(size=(B, length, N, D))]
        arrays.append(rng.uniform(size=(B, length, N, R)))
        starts = np.arange(length)[None] == [[0], [0]]
        recurrences.check_chunks(channel_delta_rule, arrays, starts, size)

    def test_a_cache_gives_the_same_token_by_token(self):
        recurrences.check_cache(*make(), X)

    def test_a_new_text_does_not_see_the_last_one(self):
        recurrences.check_new_text(*make(), X)

    def test_counts_its_operations(self):
        layer, _ = make(chunk_size=4)
        products = M * (2 * D + R * V + R + R * V) + 4 * (2 * D + R * V)
        rule = 2 * 4 * D + R * (4 * (D + 2 * V) + 4 * D * V)
        low_rank = 2 * M * K + K * N * (D + R * V)
        counted = 2 * B * L * (N * (products + rule) + low_rank)
        self.assertEqual(flops(layer, TokenShape(B, L)), counted)
