# tests: layers/attention/relative_bias.py, layers/attention/rotary.py
# tests: layers/attention/self_attention.py, wings/inference/layers/transformer.py
# tests: wings/published_layers/published_attention.py, wings/published_layers/rotary_pairs.py
# tests: wings/published_layers/heads_norms.py, wings/published_layers/warm_queries.py
"""Tests options of attention against loops in float64, in stacks and in decoding."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import rotary
from lingvo_gshard.layers.attention.relative_bias import DistanceBuckets, RelativeBias, bucket_of
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import Memory
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.inference.layers import transformer
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from tests.layers.attention import attention_options, attention_reference
from tests.layers.stacks.executions import loop
from tests.layers.stacks.stepwise import run_stepwise

B, L, K, M = 2, 9, 5, 8
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 2]], np.int32)
REAL = SEGMENTS > 0


def make(name: str, **values) -> tuple[SelfAttention, NestedMap]:
    layer = attention_options.attention(name, **values).instantiate(path="attention")
    rng = np.random.default_rng(2)
    theta = layer.init(1).transform(lambda w: w + (0.4 * rng.normal(size=w.shape)).astype("f4"))
    return layer, theta


def activations(length: int = L, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, length, M)).astype(np.float32)


def run(layer, theta, x, segments=SEGMENTS) -> tf.Tensor:
    return layer.fprop(theta, tf.constant(x), layer.mask(tf.constant(segments)))


def stack_of(name: str, **values) -> tuple[TransformerStack, NestedMap]:
    p = TransformerStack.params().set(
        num_layers=2, model_dim=M, num_heads=4, hidden_dim=12, moe_every=0
    )
    p.layer.self_attention = attention_options.attention(name)
    p.layer.cross_attention = attention_options.cross_attention(name)
    stack = p.set(**values).instantiate(path="stack")
    rng = np.random.default_rng(2)
    return stack, stack.init(1).transform(
        lambda w: w + (0.2 * rng.normal(size=w.shape)).astype("f4")
    )


class OptionsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(name=tuple(attention_options.EACH), is_causal=[False, True])
    def test_matches_the_reference_and_has_an_effect(self, name, is_causal):
        layer, theta = make(name, is_causal=is_causal)
        x = activations()

        def sees(b, q, k):
            return SEGMENTS[b, q] == SEGMENTS[b, k] > 0 and (k <= q or not is_causal)

        actual = run(layer, theta, x).numpy()
        expected = attention_reference.attention(
            PublishedAttention.of(layer.p), theta, x, SEGMENTS, sees
        )
        assert_close(actual[REAL], expected[REAL], "order")
        plain = PublishedAttention.params().set(head_dim=8, num_heads=4)
        for option, value in attention_options.EACH[name].items():
            without = PublishedAttention.of(layer.p).copy().set(**{option: plain.get(option)})
            if option in ("rotary_base", "relative_max_distance"):
                without.set(**{option: 3 * value})
            if option in ("num_key_value_heads", "value_dim", "has_value_weight"):
                continue
            other = attention_reference.attention(without, theta, x, SEGMENTS, sees)
            self.assertGreater(np.abs(other[REAL] - actual[REAL]).max(), 1e-3, option)

    @parameterized.parameters(*attention_options.EACH)
    def test_sentences_are_independent(self, name):
        layer, theta = make(name)
        x = activations()
        packed = run(layer, theta, x).numpy()
        for b, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
            chosen = SEGMENTS[b] == segment
            sentence = x[b : b + 1, chosen]
            found = run(layer, theta, sentence, np.ones((1, chosen.sum()), np.int32))
            assert_close(found[0], packed[b, chosen], "order")

    def test_chunks_see_themselves_only(self):
        layer, theta = make("rotary", is_causal=True, chunk=3)
        x = activations()
        places = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 0]])

        def sees(b, q, k):
            is_near = places[b, q] // 3 == places[b, k] // 3
            return SEGMENTS[b, q] == SEGMENTS[b, k] > 0 and k <= q and is_near

        expected = attention_reference.attention(
            PublishedAttention.of(layer.p), theta, x, SEGMENTS, sees
        )
        assert_close(run(layer, theta, x).numpy()[REAL], expected[REAL], "order")
        with self.assertRaisesRegex(ValueError, "chunk: 3 with .*is_causal=False; 0 and True"):
            make("rotary", chunk=3)

    def test_decoding_steps_equal_a_decoder_with_chunks(self):
        """Layers with chunks and layers with full attention have masks of their own."""
        full = attention_options.attention("rotary")
        near = attention_options.attention("rotary", chunk=4)
        stack, theta = stack_of("rotary", is_causal=True, attention_pattern=(near, full))
        x, ones = tf.constant(activations()), tf.ones([B, L], tf.int32)
        expected = stack.fprop(theta, x, ones)
        assert_close(run_stepwise(stack, theta, x, None), expected, "order")

    def test_positions_restart_in_every_segment(self):
        segments = tf.constant([[1, 1, 1, 2, 2, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4], [0] * 8])
        expected = [[0, 1, 2, 0, 1, 0, 0, 1], list(range(8)), list(range(8))]
        self.assertAllEqual(rotary.positions_in_segments(segments), expected)

    def test_rotary_angles_at_far_positions_are_exact(self):
        """Rotates by fractional timescales, at a position that bfloat16 cannot represent."""
        x = np.random.default_rng(3).normal(size=(1, 1, 1, 16)).astype(np.float32)
        expected = x[0, 0].astype(np.float64)
        attention_reference.rotate(expected, 3001, 1.0, 10000.0)
        position = rotary.TextPositions(tf.constant([[3001]]))
        assert_close(rotary.rotate(tf.constant(x), position, 1.0, 10000.0)[0, 0], expected, "order")
        rounded = rotary.rotate(tf.cast(x, tf.bfloat16), position, 1.0, 10000.0)
        self.assertEqual(rounded.dtype, tf.bfloat16)
        assert_close(tf.cast(rounded, tf.float32)[0, 0], expected, "bfloat16")

    @parameterized.product(
        [dict(buckets=4, most=3), dict(buckets=8, most=5), dict(buckets=32, most=128)],
        is_causal=[False, True],
    )
    def test_buckets_match_their_intervals(self, buckets, most, is_causal):
        p = attention_options.attention("relative", is_causal=is_causal)
        p.set(relative_buckets=buckets, relative_max_distance=most)
        distances = np.arange(-2 * most, 1 if is_causal else 2 * most)
        expected = [attention_reference.bucket(p, d) for d in distances]
        made = DistanceBuckets(buckets, most, is_causal)
        self.assertAllEqual(bucket_of(tf.constant(distances, tf.int32), made), expected)
        self.assertAllEqual(made.of(distances), expected)
        self.assertEqual(max(expected), buckets - 1)

    @parameterized.parameters(*attention_options.EACH)
    def test_bfloat16_keeps_its_type(self, name):
        layer, theta = make(name)
        x = activations()
        y = run(layer, theta, tf.cast(x, tf.bfloat16))
        self.assertEqual(y.dtype, tf.bfloat16)
        assert_close(
            tf.cast(y, tf.float32).numpy()[REAL], run(layer, theta, x).numpy()[REAL], "bfloat16"
        )

    @parameterized.parameters(
        "grouped",
        "rotary",
        "relative",
        "window",
        "biases",
        "published",
        "warm",
        "together",
        "keys_for_values",
    )
    def test_decoding_steps_equal_the_decoder(self, name):
        stack, theta = stack_of(name, is_decoder=True)
        x = tf.constant(activations())
        memory = Memory(
            tf.constant(activations(K, 2)), tf.constant([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
        )
        ones = tf.ones([B, L], tf.int32)
        expected = stack.fprop(theta, x, ones, memory)
        options = attention_options.EACH[name]
        shape = (B, options.get("num_key_value_heads", 4), L)
        shapes = {"key": (*shape, 8), "value": (*shape, options.get("value_dim", 8))}
        self.assertEqual(transformer.stack_cache_shapes(stack, B, L), 2 * [shapes])
        assert_close(run_stepwise(stack, theta, x, memory), expected, "order")

    @parameterized.parameters("none", "full")
    @pytest.mark.slow
    def test_a_loop_equals_its_layers(self, rematerialize):
        stack, theta = stack_of("together", execution=loop(rematerialize))
        layers, _ = stack_of("together")
        flat = NestedMap(layers=[t for _, t in stack.unrolled(theta)], final_norm=theta.final_norm)
        flat["token_dropout"] = theta.token_dropout
        flat["input_dropout"] = theta.input_dropout
        x, segments = tf.constant(activations()), tf.constant(SEGMENTS)

        def pass_of(layer, theta):
            @tf.function(jit_compile=True, autograph=False)
            def both(x):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = layer.fprop(theta, x, segments)
                    weights = np.random.default_rng(3).normal(size=y.shape).astype("f4")
                    total = tf.reduce_sum(tf.where(segments[..., None] > 0, y, 0.0) * weights)
                return y, tape.gradient(total, x)

            return both(x)

        for one, other in zip(pass_of(stack, theta), pass_of(layers, flat), strict=True):
            assert_close(one.numpy()[REAL], other.numpy()[REAL], "order")

    def test_relative_biases_are_not_gathered_with_as_many_rows_as_positions(self):
        """XLA merges equal constants of rows and of positions, and would split both alike."""
        length, heads = 64, 8

        def step(table_bN, ids_BL):
            position = tf.range(length)
            distances_LK = position[None, :] - position[:, None]
            bias = RelativeBias(DistanceBuckets(8, 32, True), table_bN).at(distances_LK)
            return tf.minimum(tf.maximum(ids_BL, 0), 32), bias.bias_NLK

        split = partition(step, "data=8", "fsdp", layouts=["weights:bN", "BL"])
        table, ids = np.zeros((8, heads), np.float32), np.zeros((length, length), np.int32)
        largest = max(c.bytes for c in split.compile(table, ids).collectives())
        self.assertLessEqual(largest, 4 * length * length)

    @parameterized.parameters(
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 .*attention.num_heads, 4"),
        ({"rotary_fraction": 0.7}, "rotary_fraction: 0.7 of attention.head_dim 8"),
        ({"relative_buckets": 7}, "relative_buckets: 7; .*attention.is_causal False"),
        ({"relative_buckets": 2}, "relative_buckets: 2; .*attention.is_causal False"),
        (
            {"relative_buckets": 32, "relative_max_distance": 8},
            "relative_max_distance: 8; more than .*attention.relative_buckets 32",
        ),
    )
    def test_rejects_invalid_options(self, values, message):
        p = SelfAttention.params().set(model_dim=M, num_heads=4, head_dim=8, **values)
        with self.assertRaisesRegex(ValueError, f"attention.{message}"):
            p.instantiate(path="attention")


if __name__ == "__main__":
    testing.main()
