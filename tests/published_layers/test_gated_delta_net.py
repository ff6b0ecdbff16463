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
from lingvo_gshard.wings.inference.layers import cached, decoding_weights, extend, state_shapes
from lingvo_gshard.wings.published_layers import delta_rule
from tests.layers.attention import attention_options

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

    def test_gradients_are_those_of_single_steps(self):
        """Chunks have gradients of their own; steps have those of TensorFlow."""
        rng = np.random.default_rng(3)
        arrays = [rng.normal(size=(B, L, N, D)) for _ in range(2)]
        arrays[1] /= np.linalg.norm(arrays[1], axis=-1, keepdims=True)
        arrays += [rng.normal(size=(B, L, N, R, V)), -rng.exponential(size=(B, L, N, R))]
        arrays = [tf.constant(x, tf.float32) for x in (*arrays, rng.uniform(size=(B, L, N, R)))]
        weights = tf.constant(rng.normal(size=(B, L, N, R, V)), tf.float32)
        is_first = tf.constant(np.arange(L)[None] == [[0], [0]])

        def chunks(*inputs):
            return delta_rule.run_rows(delta_rule.Inputs(*inputs), is_first, 4)

        def steps(*inputs):
            state, read = tf.zeros([B, N, R, D, V]), []
            for index in range(L):
                token = delta_rule.Inputs(*(x[:, index] for x in inputs))
                one, state = delta_rule.run_step(token, state)
                read.append(one)
            return tf.stack(read, 1), state

        def gradients(function):
            with tf.GradientTape() as tape:
                tape.watch(arrays)
                read, state = function(*arrays)
                loss = tf.reduce_sum(read * weights) + tf.reduce_sum(tf.sin(state))
            return [read, state, *tape.gradient(loss, arrays)]

        for one, other in zip(gradients(chunks), gradients(steps), strict=True):
            assert_close(one.numpy(), other.numpy(), "float32")

    def test_a_cache_gives_the_same_token_by_token(self):
        layer, theta = make()
        whole = layer.fprop(theta, tf.constant(X), layer.mask(None)).numpy()
        weights = decoding_weights(layer, theta)
        # Row 0 has two tokens of padding before its text.
        is_token = np.arange(4)[None] >= np.array([[2], [0]])
        view = cached.row_view(tf.constant(is_token), is_causal=True)
        first = np.stack([np.concatenate([X[0, 9:], X[0, :2]]), X[1, :4]])
        y, cache = extend(layer, weights, tf.constant(first), view, None)
        assert_close(y[0, 2:].numpy(), whole[0, :2], "float32")
        shapes = {name: tuple(value.shape) for name, value in cache.items()}
        self.assertEqual(shapes, state_shapes(layer, B, L))
        for step in range(5):
            at = np.array([2, 4]) + step
            x = tf.constant(X[[0, 1], at][:, None])
            y, cache = extend(layer, weights, x, self._view(at), None, cache)
            assert_close(y[:, 0].numpy(), whole[[0, 1], at], "float32")

    def test_a_new_text_does_not_see_the_last_one(self):
        layer, theta = make()
        weights = decoding_weights(layer, theta)
        rng = np.random.default_rng(4)
        shapes = state_shapes(layer, B, L)
        left = NestedMap(
            {n: tf.constant(rng.normal(size=s), tf.float32) for n, s in shapes.items()}
        )
        y, _ = extend(layer, weights, tf.constant(X[:, :1]), self._view(np.zeros(2)), None, left)
        whole = layer.fprop(theta, tf.constant(X), layer.mask(None)).numpy()
        assert_close(y.numpy(), whole[:, :1], "float32")

    def test_a_beam_is_refused(self):
        layer, theta = make()
        cache = NestedMap({n: tf.zeros(s) for n, s in state_shapes(layer, B, L).items()})
        with self.assertRaisesRegex(UserError, "beam_size=1 was expected"):
            extend(layer, theta, tf.constant(X[:, :3]), self._view(np.ones(2)), None, cache)

    def test_a_stack_must_be_causal(self):
        with self.assertRaisesRegex(UserError, "needs a causal stack"):
            make(is_causal=False)

    def test_counts_its_operations(self):
        layer, _ = make(chunk_size=4)
        features = 2 * D + 2 * R * V + 2 * R
        products = M * (features + R * V) + 4 * (2 * D + R * V)
        rule = 2 * 4 * D + R * (4 * (D + 2 * V) + 4 * D * V)
        self.assertEqual(flops(layer, TokenShape(B, L)), 2 * B * L * N * (products + rule))

    @staticmethod
    def _view(positions) -> cached.CacheView:
        positions = tf.constant(np.asarray(positions, np.int32)[:, None])
        nothing = tf.zeros([B, 1, 1], tf.bool)
        return cached.CacheView(positions, nothing, tf.zeros([1, 1], tf.int32), tf.constant(0))
