"""Compares ring attention on one device, which holds one part, with dense attention."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.cross_attention import CrossAttention
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.long_inputs.ring import RingKernel

B, L, K, M = 2, 9, 5, 8
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 2]], np.int32)
MEMORY_SEGMENTS = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 2, 2]], np.int32)
EVERYTHING = {
    "is_causal": True,
    "num_key_value_heads": 2,
    "window": 2,
    "logit_cap": 0.5,
    "use_sinks": True,
    "rotary_fraction": 1.0,
    "qk_norm": True,
}


def make(kind: type = SelfAttention, **values) -> tuple:
    p = kind.params().set(model_dim=M, num_heads=4, head_dim=4, **values)
    layer = p.instantiate(path="attention")
    return layer, layer.init(1)


def activations(length: int = L) -> np.ndarray:
    return np.random.default_rng(length).normal(size=(B, length, M)).astype(np.float32)


def run(layer, theta, x, memory, key_segments) -> NestedMap:
    """Returns the output and the gradients of a loss that includes padding."""
    sources = NestedMap(theta=theta, x=x)
    with tf.GradientTape() as tape:
        tape.watch(sources.flatten())
        segments = tf.constant(SEGMENTS)
        if memory is None:
            y = layer.fprop(theta, x, layer.mask(segments))
        else:
            y = layer.fprop(theta, x, memory, layer.mask(segments, tf.constant(key_segments)))
        weights = np.random.default_rng(3).normal(size=y.shape)
        total = tf.reduce_sum(y * tf.cast(weights, y.dtype))
    return NestedMap(output=y, gradients=sources.pack(tape.gradient(total, sources.flatten())))


class RingTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(
        [
            dict(values={}, dtype="float32", has_memory=False),
            dict(values={}, dtype="float32", has_memory=True),
            dict(values=EVERYTHING, dtype="float32", has_memory=False),
            dict(
                values={"logit_cap": 2.0, "num_key_value_heads": 1, "use_sinks": True},
                dtype="bfloat16",
                has_memory=False,
            ),
        ],
        block_size=[0, 4],
    )
    def test_one_part_equals_dense_attention(self, values, dtype, has_memory, block_size):
        x = tf.cast(activations(), dtype)
        memory = tf.cast(activations(K), dtype) if has_memory else None
        results = []
        kind = CrossAttention if has_memory else SelfAttention
        for kernel in (DenseKernel.params(), RingKernel.params().set(block_size=block_size)):
            layer, theta = make(kind, **values, kernel=kernel)
            key_segments = MEMORY_SEGMENTS if has_memory else SEGMENTS
            results.append(run(layer, theta, x, memory, key_segments))
        separated_by = "order" if dtype == "float32" else "bfloat16"
        for (path, one), other in zip(
            results[1].flatten_items(), results[0].flatten(), strict=True
        ):
            self.assertEqual(one.dtype, other.dtype, path)
            assert_close(tf.cast(one, tf.float32), tf.cast(other, tf.float32), separated_by)

    @parameterized.product(has_memory=(False, True), block_size=(0, 4))
    def test_one_part_drops_the_weights_that_dense_attention_drops(self, has_memory, block_size):
        results, values = [], {"dropout_rate": 0.4, "num_key_value_heads": 2, "use_sinks": True}
        memory = tf.constant(activations(K)) if has_memory else None
        kind = CrossAttention if has_memory else SelfAttention
        for kernel in (RingKernel.params().set(block_size=block_size), DenseKernel.params()):
            layer, theta = make(kind, **values, kernel=kernel)
            with context.scope(training=True, seed=tf.constant([7, 1])):
                key_segments = MEMORY_SEGMENTS if has_memory else SEGMENTS
                x = tf.constant(activations())
                results.append(run(layer, theta, x, memory, key_segments))
        for one, other in zip(*(found.flatten() for found in results), strict=True):
            assert_close(one, other, "order")

    def test_rejects_relative_buckets(self):
        message = "attention.relative_buckets: 8 .*attention.kernel, RingKernel"
        with self.assertRaisesRegex(ValueError, message):
            make(kernel=RingKernel.params(), relative_buckets=8)


if __name__ == "__main__":
    testing.main()
