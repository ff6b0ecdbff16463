# tests: layers/attention/attention.py, wings/inference/layers/cached.py
# tests: layers/attention/cross_attention.py, layers/attention/dense.py
# tests: layers/attention/multi_head_attention.py, layers/attention/self_attention.py
# tests: wings/inference/layers/attention.py, wings/inference/layers/faces.py
"""Compares SelfAttention and CrossAttention with loops over sentences, heads and positions."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.cross_attention import CrossAttention
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import cache_shapes, cached, decoding_weights, extend
from lingvo_gshard.wings.inference.layers.cached import CacheView, Visible

B, L, K, M, N = 2, 5, 6, 8, 2
QUERY_SEGMENTS = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 2, 2]], np.int32)
MEMORY_SEGMENTS = np.array([[1, 1, 2, 0, 0, 0], [1, 2, 2, 2, 2, 2]], np.int32)


def make(kind: type = SelfAttention, **values) -> tuple:
    layer = kind.params().set(model_dim=M, num_heads=N, **values).instantiate(path="attention")
    return layer, layer.init(1)


def activations(length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, length, M)).astype(np.float32)


def reference(theta, x, memory, sees) -> np.ndarray:
    """Returns softmax(q k / sqrt(D)) v over the keys k for which sees(b, q, k)."""
    w_query, w_key, w_value, w_out = (
        theta[name].numpy().astype(np.float64) for name in ("w_query", "w_key", "w_value", "w_out")
    )
    heads, head_dim = w_query.shape[1:]
    y = np.zeros(x.shape)
    for b in range(x.shape[0]):
        for q in range(x.shape[1]):
            seen = [k for k in range(memory.shape[1]) if sees(b, q, k)]
            for n in range(heads):
                query = x[b, q] @ w_query[:, n]
                scores = memory[b, seen] @ w_key[:, n] @ query / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                mixed = weights / weights.sum() @ (memory[b, seen] @ w_value[:, n])
                y[b, q] += mixed @ w_out[n]
    return y


class AttentionTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(0, 3)
    def test_cross_attention_matches_the_formula(self, head_dim):
        layer, theta = make(CrossAttention, head_dim=head_dim)
        self.assertEqual(theta.w_query.shape[2], head_dim or M // N)
        x, memory = activations(L), activations(K, seed=2)
        mask = layer.mask(tf.constant(QUERY_SEGMENTS), tf.constant(MEMORY_SEGMENTS))
        actual = layer.fprop(theta, tf.constant(x), tf.constant(memory), mask).numpy()

        def sees(b, q, k):
            return QUERY_SEGMENTS[b, q] == MEMORY_SEGMENTS[b, k]

        real = QUERY_SEGMENTS > 0
        assert_close(actual[real], reference(theta, x, memory, sees)[real], "float32")

    @parameterized.parameters(False, True)
    def test_self_attention_matches_the_formula(self, causal):
        layer, theta = make(is_causal=causal)
        x = activations(L)
        mask = layer.mask(tf.constant(QUERY_SEGMENTS))
        actual = layer.fprop(theta, tf.constant(x), mask).numpy()

        def sees(b, q, k):
            return QUERY_SEGMENTS[b, q] == QUERY_SEGMENTS[b, k] and (k <= q or not causal)

        real = QUERY_SEGMENTS > 0
        assert_close(actual[real], reference(theta, x, x, sees)[real], "float32")

    def test_queries_without_visible_keys_stay_finite(self):
        layer, theta = make()
        x = tf.constant(activations(L))
        padding = tf.zeros([B, L], tf.int32)
        y = layer.fprop(theta, x, layer.mask(padding))
        self.assertTrue(np.isfinite(y).all())

    def test_tokens_of_a_cache_equal_causal_attention(self):
        """Extends the cache by 3 tokens of a prompt, from slot 2 on, and then token by token."""
        layer, theta = make(is_causal=True)
        x = tf.constant(activations(L))
        expected = layer.fprop(theta, x, layer.mask(tf.ones([B, L], tf.int32)))
        weights = decoding_weights(layer, theta)
        empty = {
            name: tf.split(tf.zeros(shape), [5, L - 1], axis=2)
            for name, shape in cache_shapes(layer, B, L + 4).items()
        }
        cache, outputs = NestedMap(empty), []
        for begin, end in ((0, 3), *((i, i + 1) for i in range(3, L))):
            positions = tf.range(begin, end)
            distances = tf.range(-2, L + 2)[None, :] - positions[:, None]
            is_visible = (distances <= 0) & (tf.range(L + 4) >= 2)
            view = CacheView(positions[None], is_visible[None], distances, tf.constant(begin + 2))
            visible = view.visible(tf.ones([B, end - begin], tf.int32))
            y, cache = extend(layer, weights, x[:, begin:end], view, visible, cache)
            outputs.append(y)
        assert_close(tf.concat(outputs, 1), expected, "order")

    @parameterized.parameters(1, 3, 4, 9, 12)
    def test_attention_to_the_used_blocks_equals_attention_to_all_slots(self, used):
        keys, values = (
            [rng.normal(size=(B, 2, size, 4)) for size in (3, 6, 3)]
            for rng in (np.random.default_rng(seed) for seed in (1, 2))
        )
        slots = NestedMap(key=keys, value=values)
        query = np.random.default_rng(3).normal(size=(B, 1, 2, 4))
        bias = np.where(np.arange(12) < used, 0.0, -1e9)[None, None].astype(np.float32)
        slots = tf.nest.map_structure(lambda x: tf.constant(x, tf.float32), slots)
        query = tf.constant(query, tf.float32)
        expected, expected_weights = cached.attend(query, slots, Visible(bias))
        y, weights = cached.attend(query, slots, Visible(bias, tf.constant(used)))
        assert_close(y, expected, "order")
        assert_close(weights, expected_weights, "order")

    def test_bfloat16_activations_keep_their_type_and_the_softmax_its_precision(self):
        layer, theta = make()
        x = activations(L)
        exact = layer.fprop(theta, tf.constant(x), layer.mask(None))
        y = layer.fprop(theta, tf.cast(x, tf.bfloat16), layer.mask(None))
        self.assertEqual(y.dtype, tf.bfloat16)
        assert_close(tf.cast(y, tf.float32), exact, "bfloat16")

    def test_dropout_drops_weights_in_training_only(self):
        layer, theta = make(dropout_rate=0.5)
        x = tf.constant(activations(L))
        plain = layer.fprop(theta, x, layer.mask(None))
        with context.scope(training=True, seed=tf.constant([1, 2])):
            dropped = layer.fprop(theta, x, layer.mask(None))
        self.assertFalse(np.allclose(plain, dropped))

    def test_rejects_heads_that_do_not_divide_the_model(self):
        with self.assertRaisesRegex(
            ValueError, "attention.num_heads: .* do not divide model_dim 8"
        ):
            SelfAttention.params().set(model_dim=M, num_heads=3).instantiate(path="attention")

    def test_flops_are_those_of_the_products(self):
        shape = TokenShape(rows=3, length=5, memory_length=7)
        self_attention, _ = make()
        self.assertEqual(flops(self_attention, shape), 2 * 4 * 15 * M * M + 2 * 2 * 3 * 5 * 5 * M)
        cross_attention, _ = make(CrossAttention, num_key_value_heads=1)
        queries_and_output, keys_and_values = 2 * 2 * 15 * M * M, 2 * 2 * 21 * M * (M // N)
        products = 2 * 2 * 3 * 5 * 7 * M
        self.assertEqual(
            flops(cross_attention, shape), queries_and_output + keys_and_values + products
        )


if __name__ == "__main__":
    testing.main()
