"""Tests latent attention against loops in float64, in its kernels, and with its cache."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import cache_shapes, decoding_weights, extend, transformer
from lingvo_gshard.wings.inference.layers.cached import CacheView
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.long_inputs.ring import RingKernel
from tests.layers.attention import attention_options, attention_reference

B, L, M, N = 2, 7, 8, 2
RANK, PLAIN, ROTARY, VALUE = 5, 4, 2, 3
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1] * 7], np.int32)
REAL = SEGMENTS > 0


def make(**values) -> tuple:
    layer = attention_options.latent(**values).instantiate(path="attention")
    rng = np.random.default_rng(2)
    theta = layer.init(1).transform(lambda w: w + (0.4 * rng.normal(size=w.shape)).astype("f4"))
    return layer, theta


X = np.random.default_rng(1).normal(size=(B, L, M)).astype(np.float32)


def rms(x, scale):
    return x / np.sqrt((x**2).mean() + 1e-6) * scale


def reference(p, theta, x) -> np.ndarray:
    """Returns the output of one text [L,M] by the formulas of arXiv 2405.04434, section 2.1.2."""
    w = {name: np.asarray(value, np.float64) for name, value in theta.flatten_items()}

    def bias(name):
        return w.get(f"b_{name}", 0.0)

    y = np.zeros(x.shape)
    keys, values = [], []
    for k, token in enumerate(x.astype(np.float64)):
        latent = rms(token @ w["w_latent"] + bias("latent"), w["latent_norm.scale"])
        rotated = (token @ w["w_rotary_key"] + bias("rotary_key"))[None]
        attention_reference.rotate(rotated, k, 1.0, p.rotary_base, p.rotary_pairs)
        keys.append([np.concatenate([latent @ w["w_key"][:, n], rotated[0]]) for n in range(N)])
        values.append([latent @ w["w_value"][:, n] for n in range(N)])
        query = token
        if p.query_rank:
            query = rms(token @ w["w_query_down"] + bias("query_down"), w["query_norm.scale"])
        for n in range(N):
            q = query @ w["w_query"][:, n]
            turned = q[None, PLAIN:].copy()
            attention_reference.rotate(turned, k, 1.0, p.rotary_base, p.rotary_pairs)
            q = np.concatenate([q[:PLAIN], turned[0]])
            if p.temperature_floor:
                q *= attention_reference.growth(p, k)
            scores = np.array([q @ key[n] for key in keys]) / np.sqrt(PLAIN + ROTARY)
            shares = np.exp(scores - scores.max())
            mixed = shares / shares.sum() @ np.array([value[n] for value in values])
            y[k] += mixed @ w["w_out"][n]
    return y


class LatentAttentionTest(testing.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("latent_queries", {}),
        ("plain_queries", {"query_rank": 0, "use_bias": True}),
        ("halves", {"rotary_pairs": "halves", "rotary_base": 20.0}),
        ("warm", {"temperature_floor": 2, "temperature_scale": 0.5}),
        ("warm_from_0", {"temperature_floor": 2, "temperature_offset": 0}),
    )
    def test_matches_the_formulas(self, values):
        layer, theta = make(**values)
        y = layer.fprop(theta, tf.constant(X), layer.mask(tf.constant(SEGMENTS))).numpy()
        for row, segment in ((0, 1), (0, 2), (1, 1)):
            chosen = SEGMENTS[row] == segment
            assert_close(y[row, chosen], reference(layer.p, theta, X[row, chosen]), "float32")

    @parameterized.parameters(
        (BlockwiseKernel.params().set(block_size=3),), (RingKernel.params().set(block_size=3),)
    )
    def test_all_kernels_agree(self, kernel):
        results = []
        for values in ({}, {"kernel": kernel}):
            layer, theta = make(use_sinks=True, window=4, **values)
            x = tf.constant(X)
            with tf.GradientTape() as tape:
                tape.watch([x, *theta.flatten()])
                y = layer.fprop(theta, x, layer.mask(tf.constant(SEGMENTS)))
                total = tf.reduce_sum(y[REAL] * np.random.default_rng(3).normal(size=(13, M)))
            results.append([y[REAL], *tape.gradient(total, [x, *theta.flatten()])])
        for one, other in zip(*results, strict=True):
            assert_close(one, other, "order")

    def test_the_cache_holds_the_latent_vector_and_one_rotated_key(self):
        """Extends the cache by 3 tokens of a prompt, from slot 2 on, and then token by token."""
        layer, theta = make(use_bias=True, temperature_floor=2)
        x = tf.constant(X)
        expected = layer.fprop(theta, x, layer.mask(tf.ones([B, L], tf.int32)))
        weights = decoding_weights(layer, theta)
        shapes = cache_shapes(layer, B, L + 4)
        self.assertEqual(shapes, {"key": (B, 1, L + 4, RANK + ROTARY)})
        cache = NestedMap(key=tf.split(tf.zeros(shapes["key"]), [5, L - 1], axis=2))
        outputs = []
        for begin, end in ((0, 3), *((i, i + 1) for i in range(3, L))):
            positions = tf.range(begin, end)
            distances = tf.range(-2, L + 2)[None, :] - positions[:, None]
            is_visible = (distances <= 0) & (tf.range(L + 4) >= 2)
            view = CacheView(positions[None], is_visible[None], distances, tf.constant(begin + 2))
            visible = view.visible(tf.ones([B, end - begin], tf.int32))
            y, cache = extend(layer, weights, x[:, begin:end], view, visible, cache)
            outputs.append(y)
        assert_close(tf.concat(outputs, 1), expected, "order")
        distances = tf.range(L)[None, :] - tf.range(L)[:, None]
        view = CacheView(tf.range(L)[None], (distances <= 0)[None], distances)
        at_once, slots = extend(layer, weights, x, view, view.visible(tf.ones([B, L], tf.int32)))
        assert_close(at_once, expected, "order")
        assert_close(slots.key[0], tf.concat(cache.key, 2)[:, :, 2 : L + 2], "order")

    def test_a_stack_may_have_latent_attention_in_its_decoder(self):
        p = TransformerStack.params().set(model_dim=M, num_layers=2, num_heads=N, hidden_dim=12)
        p.set(is_decoder=True, moe_every=0)
        p.layer.self_attention = attention_options.latent(model_dim=0, num_heads=0)
        stack = p.instantiate(path="decoder")
        self.assertEqual(
            transformer.stack_cache_shapes(stack, 3, 4), 2 * [{"key": (3, 1, 4, RANK + ROTARY)}]
        )
        memory = dict.fromkeys(("key", "value"), (3, N, 4, M // N))
        self.assertEqual(transformer.stack_memory_shapes(stack, 3, 4), 2 * [memory])

    def test_bfloat16_keeps_its_type(self):
        layer, theta = make()
        mask = layer.mask(tf.constant(SEGMENTS))
        y = layer.fprop(theta, tf.cast(X, tf.bfloat16), mask)
        self.assertEqual(y.dtype, tf.bfloat16)
        exact = layer.fprop(theta, tf.constant(X), mask)
        assert_close(tf.cast(y, tf.float32)[REAL], exact[REAL], "bfloat16")

    def test_flops_are_those_of_the_products(self):
        layer, _ = make(query_rank=6)
        weights = M * (6 + RANK + ROTARY) + 6 * N * (PLAIN + ROTARY)
        weights += RANK * N * (PLAIN + VALUE) + N * VALUE * M
        # The layer is causal: 1 + 2 + 3 + 4 pairs of a row.
        products = 2 * 3 * 10 * N * (PLAIN + ROTARY + VALUE)
        self.assertEqual(flops(layer, TokenShape(rows=3, length=4)), 2 * 12 * weights + products)

    @parameterized.parameters(
        ({"rotary_dim": 3}, "attention.rotary_dim: 3; an even"),
        ({"rotary_pairs": "x"}, "rotary_pairs is 'x'; expected 'halves' or 'neighbors'"),
    )
    def test_rejects_invalid_options(self, values, message):
        with self.assertRaisesRegex(ValueError, message):
            make(**values)


if __name__ == "__main__":
    testing.main()
