# tests: layers/moe/dispatches/dispatch.py, layers/moe/dispatches/einsum.py
# tests: layers/moe/dispatches/gather.py
"""Tests that both dispatches agree, are exact in bfloat16, and that gather has no [G,S,E,C]."""

import math
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.routing import Assignment, TokenChoiceRouting
from lingvo_gshard.testing.layers import assert_close
from tests.layers.moe.dispatch_names import BUFFER_DISPATCHES, dispatch_params

M, H = 4, 6


def make(name: str, experts: int, group_size: int, **router):
    params = MixtureOfExperts.params().set(
        model_dim=M,
        hidden_dim=H,
        num_experts=experts,
        group_size=group_size,
        dispatch=dispatch_params(name),
    )
    params.router.set(**router)
    return params.instantiate(path="moe")


def output_and_gradients(layer, theta, x, mask, training: bool) -> NestedMap:
    sources = NestedMap(theta=theta, x=x)
    with (
        tf.GradientTape() as tape,
        context.scope(training=training, seed=tf.constant([1, 0])) as scope,
    ):
        tape.watch(sources.flatten())
        y = layer.fprop(theta, x, mask)
        weights = np.random.default_rng(3).normal(size=y.shape)
        total = tf.reduce_sum(y * tf.cast(weights, y.dtype))
        total = tf.cast(total, tf.float32) + tf.add_n(list(scope.losses.values()))
    return NestedMap(output=y, gradients=sources.pack(tape.gradient(total, sources.flatten())))


def _rows(expert, position, gate):
    kept = [g > 0 for g in gate]
    return (
        tf.constant([expert]),
        tf.constant([position]),
        tf.constant([gate], tf.float32),
        tf.constant([kept]),
        tf.cast([kept], tf.float32),
    )


class TokenChoiceBuffersTest(testing.TestCase, parameterized.TestCase):
    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        experts=st.integers(2, 5),
        tokens=st.integers(2, 14),
        group_size=st.integers(1, 8),
        factor=st.sampled_from([0.2, 0.5, 1.0, 2.5]),
        mode=st.sampled_from(["paper", "lingvo"]),
        training=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_gather_equals_einsum(self, experts, tokens, group_size, factor, mode, training, seed):
        rng = np.random.default_rng(seed)
        x = tf.constant(rng.normal(size=(1, tokens, M)), tf.float32)
        mask = tf.constant(rng.random((1, tokens)) < 0.8)
        results = []
        for name in BUFFER_DISPATCHES:
            layer = make(name, experts, group_size, mode=mode, capacity_factor=factor)
            mask_BL = tf.cast(mask, tf.float32)
            results.append(output_and_gradients(layer, layer.init(1), x, mask_BL, training))
        for (path, one), other in zip(
            results[0].flatten_items(), results[1].flatten(), strict=True
        ):
            assert_close(one, other, "order", what=path)

    @parameterized.parameters(*BUFFER_DISPATCHES)
    def test_dispatch_copies_rows_and_combine_weights_them(self, name):
        """Compares one group with two experts of two slots with values computed by hand."""
        assignments = (
            Assignment(*_rows(expert=[0, 1, 0, 0], position=[0, 0, 1, 2], gate=[0.5, 0.25, 1, 0])),
            Assignment(*_rows(expert=[1, 0, 1, 1], position=[1, 3, 2, 5], gate=[0.5, 0, 0, 0])),
        )
        routing = TokenChoiceRouting(assignments, 2, 2)
        x = tf.constant([[[1.0], [2.0], [3.0], [4.0]]])
        buffers = dispatch_params(name).instantiate().buffers(routing, tf.float32)
        slots_GECM = buffers.dispatch(x)
        self.assertAllEqual(slots_GECM[..., 0], [[[1, 3], [2, 1]]])
        combined = buffers.combine(slots_GECM * tf.constant([10.0, 100.0])[:, None, None])
        self.assertAllClose(combined[0, :, 0], [5 + 50, 50, 30, 0], rtol=1e-7, atol=0)

    @parameterized.parameters(*BUFFER_DISPATCHES)
    def test_slot_indices_above_256_are_exact_in_bfloat16(self, name):
        tokens = 600
        index = tf.range(tokens)[None]
        zeros = tf.zeros([1, tokens])
        none = tf.zeros([1, tokens], tf.bool)
        assignments = (
            Assignment(tf.zeros_like(index), index, zeros + 1, ~none, zeros + 1),
            Assignment(tf.ones_like(index), index, zeros, none, zeros),
        )
        x = tf.cast(np.random.default_rng(1).normal(size=(1, tokens, M)), tf.bfloat16)
        routing = TokenChoiceRouting(assignments, 2, tokens)
        buffers = dispatch_params(name).instantiate().buffers(routing, tf.bfloat16)
        slots_GECM = buffers.dispatch(x)
        self.assertEqual(slots_GECM.dtype, tf.bfloat16)
        self.assertAllEqual(slots_GECM[:, 0], x)
        self.assertAllEqual(slots_GECM[:, 1], tf.zeros_like(x))
        self.assertAllEqual(buffers.combine(slots_GECM), x)

    def largest_tensor(self, name: str) -> int:
        """Returns the elements of the largest tensor in the compiled forward and backward pass."""
        layer = make(name, experts=4, group_size=32)
        theta = layer.init(1)

        @tf.function(jit_compile=True, autograph=False)
        def step(x):
            return output_and_gradients(layer, theta, x, tf.ones([2, 32]), training=True)

        hlo = step.experimental_get_compiler_ir(tf.zeros([2, 32, M]))(stage="optimized_hlo")
        shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", hlo)
        self.assertTrue(shapes)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    @pytest.mark.slow
    def test_gather_has_no_tensor_of_groups_tokens_experts_and_slots(self):
        groups, tokens, experts, slots = 2, 32, 4, 16
        self.assertLess(self.largest_tensor("gather"), groups * tokens * experts * slots)
        self.assertGreaterEqual(self.largest_tensor("einsum"), groups * tokens * experts * slots)


if __name__ == "__main__":
    testing.main()
