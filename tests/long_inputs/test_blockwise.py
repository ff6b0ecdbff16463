"""Compares blockwise attention with dense attention, and limits its largest tensor."""

import math
import re

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.cross_attention import CrossAttention
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import Memory
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from tests.layers.stacks.executions import loop
from tests.layers.stacks.stepwise import run_stepwise

B, L, K, M = 2, 9, 5, 8
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 2]], np.int32)
MEMORY_SEGMENTS = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 2, 2]], np.int32)


def kernel(block_size: int) -> Params:
    """Returns the Params of a blockwise kernel, or of a dense one if the block size is 0."""
    if not block_size:
        return DenseKernel.params()
    return BlockwiseKernel.params().set(block_size=block_size)


def make(block_size: int, kind: type = SelfAttention, **values) -> tuple:
    p = kind.params().set(model_dim=M, num_heads=4, head_dim=4, **values)
    layer = p.set(kernel=kernel(block_size)).instantiate(path="attention")
    return layer, layer.init(1)


def activations(length: int = L, rows: int = B) -> np.ndarray:
    return np.random.default_rng(length).normal(size=(rows, length, M)).astype(np.float32)


def run(layer, theta, x, memory, segments, key_segments) -> NestedMap:
    """Returns the output and the gradients of a loss that includes padding."""
    sources = NestedMap(theta=theta, x=x)
    with tf.GradientTape() as tape:
        tape.watch(sources.flatten())
        if memory is None:
            y = layer.fprop(theta, x, layer.mask(segments))
        else:
            y = layer.fprop(theta, x, memory, layer.mask(segments, key_segments))
        weights = np.random.default_rng(3).normal(size=y.shape)
        total = tf.reduce_sum(y * tf.cast(weights, y.dtype))
    return NestedMap(output=y, gradients=sources.pack(tape.gradient(total, sources.flatten())))


class KernelTest(testing.TestCase, parameterized.TestCase):
    def check(
        self, values: dict, block_size: int, memory=None, key_segments=SEGMENTS, dtype="float32"
    ):
        x, results = tf.cast(activations(), dtype), []
        memory = None if memory is None else tf.cast(memory, dtype)
        kind = SelfAttention if memory is None else CrossAttention
        for size in (0, block_size):
            layer, theta = make(size, kind, **values)
            both = tf.constant(SEGMENTS), tf.constant(key_segments)
            results.append(run(layer, theta, x, memory, *both))
        separated_by = "order" if dtype == "float32" else "bfloat16"
        for (path, one), other in zip(
            results[1].flatten_items(), results[0].flatten(), strict=True
        ):
            self.assertEqual(one.dtype, other.dtype, path)
            assert_close(tf.cast(one, tf.float32), tf.cast(other, tf.float32), separated_by)

    @parameterized.product(block_size=[1, 3, 4, 9, 20], is_causal=[False, True])
    def test_equals_dense_attention(self, block_size, is_causal):
        self.check({"is_causal": is_causal}, block_size)

    def test_all_supported_options(self):
        values = {"window": 2, "logit_cap": 0.5, "rotary_fraction": 1.0, "qk_norm": True}
        self.check({**values, "is_causal": True, "num_key_value_heads": 2, "use_sinks": True}, 4)

    def test_cross_attention(self):
        self.check({}, 2, activations(K), MEMORY_SEGMENTS)

    @parameterized.parameters(1, 4, 20)
    def test_drops_the_weights_that_dense_attention_drops(self, block_size):
        values = {"dropout_rate": 0.4, "num_key_value_heads": 2, "use_sinks": True}
        with context.scope(training=True, seed=tf.constant([7, 1])):
            self.check(values, block_size)
            self.check(values, block_size, activations(K), MEMORY_SEGMENTS)

    def test_in_bfloat16(self):
        self.check({"logit_cap": 2.0}, 4, dtype="bfloat16")


def stack_of(block_size: int, **values) -> tuple[TransformerStack, NestedMap]:
    p = TransformerStack.params().set(
        num_layers=2, model_dim=M, num_heads=2, hidden_dim=12, moe_every=0, is_decoder=True
    )
    for attention in (p.layer.self_attention, p.layer.cross_attention):
        attention.set(kernel=kernel(block_size), num_key_value_heads=1, logit_cap=2.0, qk_norm=True)
    p.layer.self_attention.set(rotary_fraction=0.5, window=5)
    stack = p.set(**values).instantiate(path="stack")
    return stack, stack.init(1)


def stack_pass(block_size: int, **values) -> list[tf.Tensor]:
    stack, theta = stack_of(block_size, **values)
    segments = tf.constant(SEGMENTS)

    @tf.function(jit_compile=True, autograph=False)
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            memory = Memory(tf.constant(activations(K)), tf.constant(MEMORY_SEGMENTS))
            y = stack.fprop(theta, x, segments, memory)
            y = tf.where(segments[..., None] > 0, y, 0.0)
            total = tf.reduce_sum(y * np.random.default_rng(3).normal(size=y.shape).astype("f4"))
        return y, tape.gradient(total, x)

    return both(tf.constant(activations()))


class StackTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({},),
        ({"execution": loop()},),
        ({"execution": loop("products")},),
        ({"execution": loop("full"), "is_decoder": False},),
        ({"execution": loop("products"), "attention_dropout_rate": 0.3},),
    )
    @pytest.mark.slow
    def test_in_a_stack(self, values):
        of_whole = {name: value for name, value in values.items() if name != "execution"}
        with context.scope(training=True, seed=tf.constant([7, 1])):
            whole = stack_pass(0, **of_whole)
            for one, other in zip(stack_pass(4, **values), whole, strict=True):
                assert_close(one, other, "order")

    def test_decoding_steps_equal_fprop(self):
        stack, theta = stack_of(4)
        x, ones = tf.constant(activations()), tf.ones([B, L], tf.int32)
        memory = Memory(tf.constant(activations(K)), tf.constant(np.minimum(MEMORY_SEGMENTS, 1)))
        expected = stack.fprop(theta, x, ones, memory)
        assert_close(run_stepwise(stack, theta, x, memory), expected, "order")


def largest_tensor(block_size: int) -> int:
    """Returns the elements of the largest tensor in a compiled training pass of a stack."""
    p = TransformerStack.params().set(
        num_layers=1, model_dim=M, num_heads=2, hidden_dim=12, moe_every=0
    )
    p.layer.self_attention.kernel = kernel(block_size)
    stack = p.instantiate(path="stack")
    theta = stack.init(1)

    @tf.function(jit_compile=True, autograph=False)
    def step(x, segments):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(tf.square(stack.fprop(theta, x, segments)))
        return tape.gradient(total, x)

    inputs = tf.zeros([1, 256, M]), tf.ones([1, 256], tf.int32)
    hlo = step.experimental_get_compiler_ir(*inputs)(stage="optimized_hlo")
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", hlo)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


class LimitsTest(testing.TestCase, parameterized.TestCase):
    def test_has_no_tensor_of_queries_by_keys(self):
        self.assertLess(largest_tensor(16), 256 * 256 // 4)
        self.assertGreaterEqual(largest_tensor(0), 2 * 256 * 256)

    def test_rejects_relative_buckets(self):
        message = "attention.relative_buckets: 8 .*BlockwiseKernel"
        with self.assertRaisesRegex(ValueError, message):
            make(block_size=4, relative_buckets=8)


if __name__ == "__main__":
    testing.main()
