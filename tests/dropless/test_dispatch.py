# tests: wings/dropless/dispatch.py, wings/dropless/expert_blocks.py, wings/kernels/exchange.py
"""Tests dropless dispatch against other dispatches and loops, on one device and on many."""

import functools
import math
import re
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.dropless import expert_blocks
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from tests.dropless.example_layers import (
    E,
    H,
    M,
    both_ways,
    check_equal,
    make,
    on_devices,
    run_experts,
    weights_of,
)
from tests.layers.moe.dispatch_names import dispatch_params
from tests.layers.stacks.executions import loop, sequential

TOKENS = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(1, 24, M)).astype(np.float32)
MASK = np.ones((1, 24), np.int32)


def make_stack(execution, dispatch="dropless", group_size=5, **options) -> TransformerStack:
    moe = MixtureOfExperts.params().set(
        num_experts=E, group_size=group_size, dispatch=dispatch_params(dispatch)
    )
    moe.dispatch.set(**options)
    moe.router.capacity_factor = 0.0 if dispatch == "dropless" else float(E)
    params = TransformerStack.params().set(
        model_dim=M, hidden_dim=H, num_heads=1, num_layers=2, moe=moe, moe_every=1,
        execution=execution,
    )  # fmt: skip
    return params.instantiate(path="stack")


class DroplessTest(testing.TestCase, parameterized.TestCase):
    def setUp(self):
        """Makes blocks so small that few rows fill several, with final blocks of several sizes."""
        super().setUp()
        sizes = {"LARGEST_BLOCK": 5, "SMALLEST_STEP": 1, "STEPS": 3}
        self.enter_context(mock.patch.multiple(expert_blocks, **sizes))

    @hypothesis.given(
        experts=st.integers(2, 9),
        tokens=st.integers(1, 20),
        group_size=st.integers(1, 8),
        is_gated=st.booleans(),
        use_bias=st.booleans(),
        training=st.booleans(),
        seed=st.integers(0, 1000),
    )
    @hypothesis.settings(max_examples=8, deadline=None)
    def test_equals_other_dispatches_if_no_token_is_dropped(
        self, experts, tokens, group_size, is_gated, use_bias, training, seed
    ):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(1, tokens, M)).astype(np.float32)
        mask = tf.constant(rng.random((1, tokens)) < 0.8, tf.int32)
        results = []
        for dispatch in ("dropless", "gather", "einsum"):
            layer = make(dispatch, experts, group_size, experts__use_bias=use_bias)
            if is_gated:
                layer = make(
                    dispatch, experts, group_size, experts__use_bias=use_bias,
                    experts__activation="swiglu",
                )  # fmt: skip
            results.append(both_ways(layer, weights_of(layer), x, mask, training))
        for other in results[1:]:
            check_equal(results[0], other)

    @hypothesis.given(
        data=st.data(), choices=st.integers(1, 3), groups=st.integers(1, 3), size=st.integers(1, 7)
    )
    @hypothesis.settings(max_examples=8, deadline=None)
    def test_equals_a_loop_over_tokens(self, data, choices, groups, size):
        """Covers experts without tokens, experts with all tokens, and tokens without an expert."""
        shape = (choices, groups, size)
        count = math.prod(shape)
        number = data.draw(st.lists(st.integers(0, E - 1), min_size=count, max_size=count))
        kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        expert_KGS, kept_KGS = np.reshape(number, shape), np.reshape(kept, shape)
        gate_KGS = np.where(kept_KGS, RNG.random(shape), 0).astype(np.float32)
        layer = Experts.params().set(model_dim=M, hidden_dim=H, num_experts=E).instantiate(path="e")
        theta = layer.init(1)
        x_GSM = RNG.normal(size=(groups, size, M)).astype(np.float32)
        y_GSM = run_experts(
            DroplessDispatch.params(), layer, theta, x_GSM, expert_KGS, gate_KGS, kept_KGS
        )
        w_in, w_out = theta.w_in.numpy(), theta.w_out.numpy()
        wanted = np.zeros(x_GSM.shape)
        for k, g, s in np.ndindex(shape):
            e = expert_KGS[k, g, s]
            hidden = np.maximum(x_GSM[g, s].astype(np.float64) @ w_in[e], 0)
            wanted[g, s] += gate_KGS[k, g, s] * (hidden @ w_out[e]) * kept_KGS[k, g, s]
        assert_close(y_GSM, wanted, "float32")

    @pytest.mark.slow
    def test_compiled_results_equal_eager_ones_also_in_bfloat16(self):
        layer = make(experts__use_bias=True)
        theta = weights_of(layer)
        compiled = tf.function(both_ways, jit_compile=True, autograph=False)
        exact = both_ways(layer, theta, X, MASK)
        check_equal(compiled(layer, theta, X, MASK), exact)
        rounded = both_ways(layer, theta, tf.cast(X, tf.bfloat16), MASK)
        self.assertEqual(rounded.output.dtype, tf.bfloat16)
        exact = both_ways(layer, theta, tf.cast(tf.cast(X, tf.bfloat16), tf.float32), MASK)
        assert_close(tf.cast(rounded.output, tf.float32), exact.output, "bfloat16")
        assert_close(
            rounded.gradients.theta.experts.w_in, exact.gradients.theta.experts.w_in, "bfloat16"
        )

    @pytest.mark.slow
    def test_has_no_tensor_of_all_experts_and_slots(self):
        tokens, experts = 64, 16
        layer = make(experts=experts, group_size=tokens)
        theta = layer.init(1)
        step = tf.function(
            lambda x: both_ways(layer, theta, x, tf.ones([1, tokens])), jit_compile=True
        )
        text = step.experimental_get_compiler_ir(tf.zeros([1, tokens, M]))(stage="optimized_hlo")
        shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", text)
        largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
        # The largest tensor is the one-hot choices [K,T,E]. There are no buffers [E,C] or [E,C,M].
        self.assertLessEqual(largest, 2 * tokens * experts)
        self.assertLess(largest, experts * tokens * M)

    def test_no_slice_starts_at_a_data_dependent_position(self):
        """TensorFlow would evaluate the layers before such a slice at compile time."""
        layer = make()
        function = tf.function(functools.partial(both_ways, layer), autograph=False)
        graph = function.get_concrete_function(
            weights_of(layer), tf.zeros([2, 8, M]), tf.ones([2, 8])
        ).graph
        nodes = {
            f"{scope.signature.name}/{node.name}": node
            for scope in graph.as_graph_def().library.function
            for node in scope.node_def
        }
        slices = [name for name, node in nodes.items() if node.op in ("Slice", "StridedSlice")]
        for name in slices:
            scope = name.split("/")[0]
            begin = nodes[name].input[1].split(":")[0]
            self.assertEqual(nodes[f"{scope}/{begin}"].op, "Const", name)

    def test_the_lowering_looks_for_no_constants_among_rows_and_weights(self):
        """TensorFlow would fill memory of their sizes for each block's size."""
        function = tf.function(functools.partial(both_ways, make()), jit_compile=True)
        arguments = weights_of(make()), tf.zeros([2, 8, M]), tf.ones([2, 8])
        library = function.get_concrete_function(*arguments).graph.as_graph_def().library
        nodes = [node for scope in library.function for node in scope.node_def]
        cases = [node for node in nodes if node.op in ("Case", "StatelessCase")]
        self.assertTrue(cases)
        self.assertFalse(any("_xla_propagate_compile_time_consts" in n.attr for n in cases))

    def test_expert_dropout_is_independent_for_every_row(self):
        """An expert gives equal outputs for equal tokens, except for dropout."""
        layer = make(experts=2, group_size=24, experts__dropout_rate=0.5, experts__use_bias=True)
        theta = weights_of(layer)
        x = np.ones((1, 24, M), np.float32)
        y = both_ways(layer, theta, x, MASK, training=True).output.numpy()[0]
        self.assertGreater(len(np.unique(y.round(5), axis=0)), 12)
        self.assertAllEqual(y, both_ways(layer, theta, x, MASK, training=True).output[0])
        other = both_ways(layer, theta, x, MASK, training=True, seed=2).output[0]
        self.assertNotAllEqual(y, other)
        evaluated = both_ways(layer, theta, x, MASK).output.numpy()[0]
        self.assertAllClose(
            evaluated, np.broadcast_to(evaluated[0], evaluated.shape), rtol=1e-5, atol=0
        )

    @parameterized.parameters(1, 3)
    def test_results_do_not_depend_on_the_number_of_tokens(self, tokens):
        layer = make(experts=8)
        theta = weights_of(layer)
        many = both_ways(layer, theta, X, MASK).output
        few = both_ways(layer, theta, X[:, :tokens], MASK[:, :tokens]).output
        assert_close(few, many[:, :tokens], "float32")

    @parameterized.parameters(
        ({"router__capacity_factor": 2.0}, "moe.router.capacity_factor=2 .*dropless"),
        (
            {"router__evaluation_capacity_factor": 2.0},
            "moe.router.evaluation_capacity_factor=2 .*dropless",
        ),
    )
    def test_rejects_unsupported_options(self, values, message):
        with self.assertRaisesRegex(ValueError, message):
            make(**values)

    def check_mesh(self, mesh: str, strategy: str) -> None:
        """Compares a layer on a mesh with one device."""
        layer = make(experts=8, experts__use_bias=True, experts__activation="swiglu")
        theta = weights_of(layer)
        x = RNG.normal(size=(8, TOKENS, M)).astype(np.float32)
        found = on_devices(layer, mesh, strategy)(theta, x)
        check_equal(found, both_ways(layer, theta, x, tf.ones(x.shape[:2], tf.int32)))

    def test_many_devices_equal_one_device(self):
        self.check_mesh("data=8", "expert")

    @pytest.mark.slow
    def test_a_mesh_of_three_axes_equals_one_device(self):
        self.check_mesh("data=2,fsdp=2,model=2", "expert_fsdp_tensor")

    @pytest.mark.slow
    def test_folded_experts_equal_one_device(self):
        self.check_mesh("data=4,model=2", "folded_tensor")

    @pytest.mark.slow
    def test_rows_are_exchanged_twice_in_each_direction(self):
        """The forward pass also exchanges row counts. Metrics and gradients need an all-reduce."""
        layer = make(experts=8)
        shapes = (
            layer.variable_specs().transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype)),
            tf.TensorSpec((8, TOKENS, M)),
        )
        forward = on_devices(layer, "data=8", "expert", with_gradient=False)
        self.assertCollectives(forward, *shapes, expected={"all-to-all": 3, "all-reduce": 1})
        both = on_devices(layer, "data=8", "expert")
        self.assertCollectives(both, *shapes, expected={"all-to-all": 5, "all-reduce": 1})

    def run_bounded(self, bound: float) -> tuple[np.ndarray, NestedMap, tf.Tensor]:
        """Returns the output and metrics on eight devices, and the output of one device.

        All tokens are equal, so all rows go to two of the eight devices.
        """
        layer = make(experts=8, dispatch__bound=bound, dispatch__over_bound="drop")
        theta = weights_of(layer)
        x = np.ones((8, TOKENS, M), np.float32)
        output, metrics = on_devices(layer, "data=8", "expert", with_gradient=False)(theta, x)
        one_device = both_ways(layer, theta, x, tf.ones(x.shape[:2], tf.int32)).output
        return np.asarray(output), metrics, one_device

    def test_rows_above_the_bound_are_dropped_and_counted(self):
        output, metrics, _ = self.run_bounded(1.0)
        self.assertGreaterEqual(float(metrics["moe/over_bound_share"]), 0.4)
        taken = np.any(output, -1).mean()
        self.assertGreater(taken, 0)
        self.assertLess(taken, 0.5)

    @pytest.mark.slow
    def test_without_a_bound_no_row_is_dropped(self):
        output, metrics, one_device = self.run_bounded(0.0)
        self.assertNotIn("moe/over_bound_share", metrics)
        assert_close(output, one_device, "order")

    @pytest.mark.slow
    def test_no_row_is_above_a_large_bound(self):
        output, metrics, one_device = self.run_bounded(8.0)
        self.assertEqual(float(metrics["moe/over_bound_share"]), 0)
        assert_close(output, one_device, "order")

    def check_loop(self, policy: str) -> None:
        """Compares a loop with rematerialization with the gather dispatch in the same loop."""
        results = []
        for dispatch in ("dropless", "gather"):
            stack = make_stack(loop(policy), dispatch)
            results.append(both_ways(stack, stack.init(1), X[:, :9], MASK[:, :9]))
        check_equal(*results)

    def test_works_in_loops_with_rematerialization(self):
        self.check_loop("products")

    @pytest.mark.slow
    def test_works_in_loops_that_rematerialize_everything(self):
        self.check_loop("full")

    def check_rematerialized(self, execution, policy: str, mesh: str, strategy: str) -> None:
        """Compares a stack on a mesh with one device.

        What the region of the forward pass computes is saved for the region of the gradient.
        """
        stack = make_stack(execution(policy), group_size=4)
        theta = stack.init(1)
        x = RNG.normal(size=(4, 8, M)).astype(np.float32)
        found = on_devices(stack, mesh, strategy)(theta, x)
        check_equal(found, both_ways(stack, theta, x, tf.ones(x.shape[:2], tf.int32)))

    @pytest.mark.slow
    def test_rematerialized_stacks_equal_one_device_on_a_mesh(self):
        self.check_rematerialized(loop, "products", "data=2", "expert")

    @parameterized.parameters(
        (loop, "none"),
        (loop, "products_but_hidden"),
        (loop, "full"),
        (sequential, "products"),
        (sequential, "products_but_hidden"),
        (sequential, "full"),
    )
    @pytest.mark.slow
    def test_stacks_of_other_policies_equal_one_device_on_a_mesh(self, execution, policy):
        self.check_rematerialized(execution, policy, "data=2", "expert")

    @parameterized.parameters(
        (loop, "products"),
        (sequential, "products"),
        (loop, "none"),
        (loop, "products_but_hidden"),
        (loop, "full"),
        (sequential, "products_but_hidden"),
        (sequential, "full"),
    )
    @pytest.mark.slow
    def test_stacks_equal_one_device_on_a_mesh_with_a_model_axis(self, execution, policy):
        mesh, strategy = "data=2,model=2", "expert_sequence_tensor"
        self.check_rematerialized(execution, policy, mesh, strategy)

    @pytest.mark.slow
    def test_saved_shards_of_a_loop_stay_on_their_devices(self):
        """The gradient exchanges rows twice, and repeats the exchanges that a policy recomputes."""
        counts = {
            "none": {"all-to-all": 5, "all-reduce": 4},
            "products": {"all-to-all": 8, "all-reduce": 4},
        }
        for policy, expected in counts.items():
            stack = make_stack(loop(policy), group_size=4, bound=0.0)
            theta = stack.variable_specs().transform(lambda s: tf.TensorSpec(s.shape, s.dtype))
            compiled = on_devices(stack, "data=4", "expert").compile(
                theta, tf.TensorSpec((4, 8, M))
            )
            self.assertEmpty(compiled.full_replications())
            self.assertCollectives(compiled, expected=expected)


if __name__ == "__main__":
    testing.main()
