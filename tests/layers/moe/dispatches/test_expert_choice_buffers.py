# tests: layers/moe/dispatches/dispatch.py, layers/moe/dispatches/einsum.py
# tests: layers/moe/dispatches/gather.py
"""Compares dispatches of expert-choice routings with each other and with loops."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.moe.dispatches.dispatch import Buffers
from lingvo_gshard.layers.moe.routing import ExpertChoiceRouting
from lingvo_gshard.testing.layers import assert_close
from tests.layers.moe.dispatch_names import BUFFER_DISPATCHES, dispatch_params

M = 3


def buffers_of(name: str, routing: ExpertChoiceRouting, dtype: tf.DType) -> Buffers:
    return dispatch_params(name).instantiate().buffers(routing, dtype)


def make_routing(token_of_slot_GEC, gate_of_slot_GEC, tokens: int) -> ExpertChoiceRouting:
    groups, experts, capacity = token_of_slot_GEC.shape
    is_taken_GS = np.zeros((groups, tokens + 1), bool)
    for g in range(groups):
        is_taken_GS[g, token_of_slot_GEC[g].ravel()] = True
    return ExpertChoiceRouting(
        tf.constant(token_of_slot_GEC, tf.int32),
        tf.constant(gate_of_slot_GEC, tf.float32),
        tf.constant(is_taken_GS[:, :tokens]),
        experts,
        capacity,
    )


def draw_routing(rng, tokens: int, experts: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws the tokens of every expert in two groups, without repetition; some slots are empty."""
    drawn = [rng.permutation(tokens)[:capacity] for _ in range(2 * experts)]
    token_GEC = np.reshape(drawn, (2, experts, capacity))
    token_GEC = np.where(rng.random(token_GEC.shape) < 0.3, tokens, token_GEC)
    return token_GEC, np.where(token_GEC < tokens, rng.random(token_GEC.shape), 0)


class ExpertChoiceBuffersTest(testing.TestCase, parameterized.TestCase):
    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        tokens=st.integers(1, 9),
        experts=st.integers(1, 4),
        capacity=st.integers(1, 9),
        seed=st.integers(0, 2**32),
    )
    def test_outputs_and_gradients_equal_a_loop(self, tokens, experts, capacity, seed):
        rng = np.random.default_rng(seed)
        token_GEC, gate_GEC = draw_routing(rng, tokens, experts, min(capacity, tokens))
        x = rng.normal(size=(2, tokens, M))
        factor_E = rng.normal(size=experts)
        d_out = rng.normal(size=x.shape)
        slots = np.zeros((*token_GEC.shape, M))
        out, d_x, d_gate = np.zeros(x.shape), np.zeros(x.shape), np.zeros(gate_GEC.shape)
        for (g, e, c), s in np.ndenumerate(token_GEC):
            if s < tokens:
                slots[g, e, c] = x[g, s]
                out[g, s] += gate_GEC[g, e, c] * factor_E[e] * x[g, s]
                d_x[g, s] += gate_GEC[g, e, c] * factor_E[e] * d_out[g, s]
                d_gate[g, e, c] = factor_E[e] * (x[g, s] @ d_out[g, s])

        for name in BUFFER_DISPATCHES:
            x_GSM, gate = tf.constant(x, tf.float32), tf.constant(gate_GEC, tf.float32)
            with tf.GradientTape() as tape:
                tape.watch([x_GSM, gate])
                routing = make_routing(token_GEC, gate_GEC, tokens)
                routing = ExpertChoiceRouting(
                    routing.token_of_slot_GEC, gate, routing.is_taken_GS, experts, routing.capacity
                )
                buffers = buffers_of(name, routing, tf.float32)
                x_GECM = buffers.dispatch(x_GSM)
                y_GECM = x_GECM * tf.constant(factor_E, tf.float32)[:, None, None]
                y_GSM = buffers.combine(y_GECM)
                total = tf.reduce_sum(y_GSM * tf.constant(d_out, tf.float32))
            self.assertAllEqual(x_GECM, slots.astype(np.float32))
            assert_close(y_GSM, out, "float32")
            found_x, found_gate = tape.gradient(total, [x_GSM, gate])
            assert_close(found_x, d_x, "float32")
            assert_close(found_gate, d_gate, "float32")

    @parameterized.parameters(*BUFFER_DISPATCHES)
    def test_compiled_results_equal_eager_ones(self, name):
        rng = np.random.default_rng(1)
        token_GEC, gate_GEC = draw_routing(rng, 8, 3, 4)
        routing = make_routing(token_GEC, gate_GEC, 8)

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                buffers = buffers_of(name, routing, tf.float32)
                y = buffers.combine(buffers.dispatch(x) ** 2)
                total = tf.reduce_sum(y**2)
            return y, tape.gradient(total, x)

        x = tf.constant(rng.normal(size=(2, 8, M)), tf.float32)
        compiled = tf.function(step, jit_compile=True, autograph=False)(x)
        for one, other in zip(compiled, step(x), strict=True):
            assert_close(one, other, "order")

    @parameterized.parameters(*BUFFER_DISPATCHES)
    def test_slot_indices_above_256_are_exact_in_bfloat16(self, name):
        tokens = 600
        order = np.random.default_rng(1).permutation(tokens)
        routing = make_routing(order[None, None], np.ones((1, 1, tokens)), tokens)
        x = tf.cast(np.random.default_rng(1).normal(size=(1, tokens, M)), tf.bfloat16)
        buffers = buffers_of(name, routing, tf.bfloat16)
        x_GECM = buffers.dispatch(x)
        self.assertEqual(x_GECM.dtype, tf.bfloat16)
        self.assertAllEqual(x_GECM[:, 0], tf.gather(x, order, axis=1))
        self.assertAllEqual(buffers.combine(x_GECM), x)

    def test_gather_has_no_tensor_of_groups_tokens_experts_and_slots(self):
        groups, tokens, experts, capacity = 2, 24, 4, 20
        rng = np.random.default_rng(1)
        routing = make_routing(*draw_routing(rng, tokens, experts, capacity), tokens)
        sizes = {}
        for name in BUFFER_DISPATCHES:

            def step(x, name=name):
                buffers = buffers_of(name, routing, tf.float32)
                return buffers.combine(buffers.dispatch(x))

            spec = tf.TensorSpec((groups, tokens, M))
            graph = tf.function(step, autograph=False).get_concrete_function(spec).graph
            outputs = [tensor for op in graph.get_operations() for tensor in op.outputs]
            sizes[name] = max(t.shape.num_elements() for t in outputs if t.shape.rank is not None)
        self.assertGreaterEqual(sizes["einsum"], groups * tokens * experts * capacity)
        self.assertLess(4 * sizes["gather"], groups * tokens * experts * capacity)


if __name__ == "__main__":
    testing.main()
