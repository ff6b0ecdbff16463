# tests: wings/repeat/loop.py, layers/stacks/execution.py, core/autodiff/remat_unit.py
"""Compares loops of layers with layers run one by one, under all remat policies."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.remat_policy import ON_DEVICE
from lingvo_gshard.core.autodiff.remat_unit import rematerialized
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import Memory
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.fine_tuning.surgery.expert_use import metric_vector
from lingvo_gshard.wings.published_layers.routers import SigmoidRouter
from tests.layers.stacks.executions import loop, pipeline, sequential
from tests.layers.stacks.stepwise import run_stepwise

B, L, K, M = 2, 8, 6, 16
COTANGENT = np.random.default_rng(5).normal(size=(B, L, M)).astype(np.float32)
SEED = tf.constant([3, 4])


def stack(num_layers: int = 4, **values: object) -> TransformerStack:
    p = TransformerStack.params().set(
        num_layers=num_layers,
        model_dim=M,
        num_heads=2,
        hidden_dim=24,
        is_decoder=True,
        moe=MixtureOfExperts.params().set(num_experts=4, group_size=8),
        residual_dropout_rate=0.1,
        attention_dropout_rate=0.1,
        **values,
    )
    return p.instantiate(path="decoder")


def inputs() -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(0)
    return tuple(tf.constant(rng.normal(size=(B, n, M)), tf.float32) for n in (L, K))


def pass_of(layer: TransformerStack):
    """Returns a function of (x, memory, *weights) that runs one training pass."""
    theta = layer.variable_specs()

    def run(*tensors: tf.Tensor) -> dict:
        x, memory, *weights = tensors
        with context.scope(training=True, seed=SEED) as scope, tf.GradientTape() as tape:
            tape.watch(tensors)
            source = Memory(memory, tf.ones([B, K], tf.int32))
            output = layer.fprop(theta.pack(weights), x, tf.ones([B, L], tf.int32), source)
            total = tf.add_n([tf.reduce_sum(output * COTANGENT), *scope.losses.values()])
        gradients = tape.gradient(total, tensors)
        return {
            "output": output,
            "losses": tf.add_n([tf.zeros([]), *scope.losses.values()]),
            "metrics": {name: value for name, (value, _) in scope.metrics.items()},
            "gradients": gradients,
        }

    return run


def by_name(layer: TransformerStack, found: dict) -> dict:
    """Returns the results of a pass, with gradients keyed by the names of the layers' weights."""
    x, memory, *weights = found["gradients"]
    named = {"x": x, "memory": memory}
    for spec, gradient in zip(layer.variable_specs().flatten(), weights, strict=True):
        slices = zip(spec.slices, gradient, strict=True) if spec.slices else [(spec.path, gradient)]
        named.update(slices)
    metrics = dict(zip(*metric_vector(found["metrics"].items()), strict=True))
    return {**found, "gradients": named, "metrics": metrics}


def run(jit_compile: bool | None = None, **values: object) -> dict:
    layer = stack(**values)
    function = pass_of(layer)
    if jit_compile is not None:
        function = tf.function(function, jit_compile=jit_compile, autograph=False)
    return by_name(layer, function(*inputs(), *layer.init(1).flatten()))


@functools.cache
def one_by_one() -> dict:
    """Returns the results of layers run one by one."""
    return run()


class RepeatTest(testing.TestCase, parameterized.TestCase):
    def assert_same(self, actual: dict, expected: dict) -> None:
        assert_close(actual["output"], expected["output"], "order")
        assert_close(actual["losses"], expected["losses"], "order")
        for part in ("metrics", "gradients"):
            self.assertEqual(set(actual[part]), set(expected[part]))
            for name, value in expected[part].items():
                assert_close(actual[part][name], value, "order")

    def test_initial_weights_equal_those_of_layers_one_by_one(self):
        looped, layers = stack(execution=loop()), stack()
        paths = [spec.path for spec in layers.variable_specs().flatten()]
        expected = dict(zip(paths, layers.init(1).flatten(), strict=True))
        for spec, weight in zip(
            looped.variable_specs().flatten(), looped.init(1).flatten(), strict=True
        ):
            self.assertEqual(weight.shape, spec.shape)
            slices = zip(spec.slices, weight, strict=True) if spec.slices else [(spec.path, weight)]
            for path, value in slices:
                self.assertAllEqual(value, expected.pop(path))
        self.assertFalse(expected)

    @parameterized.parameters((loop(),), (pipeline(2),))
    def test_flops_and_active_parameters_equal_those_of_layers_one_by_one(self, execution):
        shape = TokenShape(rows=B, length=L, memory_length=K)
        layers, other = stack(moe_every=0), stack(moe_every=0, execution=execution)
        self.assertEqual(flops(other, shape), flops(layers, shape))
        self.assertGreater(flops(layers, shape), 0)
        self.assertEqual(active_parameters(other), active_parameters(layers))
        self.assertGreater(active_parameters(layers), 0)

    @parameterized.product(policy=tuple(ON_DEVICE), execution=[sequential, loop])
    def test_eager_results_are_bitwise_equal(self, execution, policy):
        found = run(execution=execution(policy))
        self.assertAllClose(found, one_by_one(), rtol=0, atol=0)

    @parameterized.parameters(
        (loop, "none"), (loop, "products_but_hidden"), (loop, "full"), (sequential, "products")
    )
    @pytest.mark.slow
    def test_compiled_results_are_equal(self, execution, policy):
        self.assert_same(run(True, execution=execution(policy)), one_by_one())

    @pytest.mark.slow
    def test_results_of_an_uncompiled_graph_are_equal(self):
        self.assert_same(run(False, execution=loop("products")), one_by_one())

    @pytest.mark.slow
    def test_decoding_equals_layers_one_by_one(self):
        results = []
        for execution in (sequential(), loop()):
            layer = stack(execution=execution)
            theta = layer.init(1)
            x, memory = inputs()
            source = Memory(memory, tf.ones([B, K], tf.int32))
            results.append(run_stepwise(layer, theta, x[:, :2], source))
        self.assertAllEqual(*results)

    def test_layers_are_observed_by_their_names_without_the_loop(self):
        layer = stack(execution=loop())
        theta: NestedMap = layer.init(1)
        seen = []
        x, memory = inputs()
        with context.scope(on_output=lambda path, _: seen.append(path)):
            source = Memory(memory, tf.ones([B, K], tf.int32))
            layer.fprop(theta, x, tf.ones([B, L], tf.int32), source)
        self.assertIn("decoder.layers[3].feed_forward", seen)


def compiled_text(**values: object) -> str:
    layer = stack(**values)
    function = tf.function(pass_of(layer), jit_compile=True, autograph=False)
    tensors = (*inputs(), *layer.init(1).flatten())
    return function.experimental_get_compiler_ir(*tensors)(stage="hlo")


def optimized_products(policy: str, **values: object) -> int:
    """Returns the number of matrix products in a compiled pass."""
    layer = stack(num_layers=2, execution=sequential(policy), **values)
    function = tf.function(pass_of(layer), jit_compile=True, autograph=False)
    tensors = (*inputs(), *layer.init(1).flatten())
    ir = function.experimental_get_compiler_ir(*tensors)
    return ir(stage="optimized_hlo").count(" dot(")


class ProgramTest(testing.TestCase):
    @pytest.mark.slow
    def test_the_program_does_not_grow_with_depth(self):
        few, many = (compiled_text(num_layers=n, execution=loop("full")) for n in (4, 16))
        # Each layer with experts reports a loss and three metrics of its own.
        self.assertLess(many.count(" = "), 1.1 * few.count(" = "))
        self.assertEqual(many.count(" while("), few.count(" while("))

    @pytest.mark.slow
    def test_policies_that_save_less_compile_to_more_products(self):
        counts = {policy: optimized_products(policy) for policy in ON_DEVICE}
        kept, but_hidden = counts["products"], counts["products_but_hidden"]
        self.assertLess(counts["none"], kept, counts)
        self.assertLess(kept, but_hidden, counts)
        self.assertLess(but_hidden, counts["full"], counts)

    @pytest.mark.slow
    def test_the_compiler_does_not_undo_rematerialization(self):
        self.assertLess(
            optimized_products("none", moe_every=0), optimized_products("full", moe_every=0)
        )


class ErrorsTest(testing.TestCase):
    def test_an_unknown_policy_suggests_the_nearest(self):
        with self.assertRaisesRegex(
            ValueError, r"decoder.execution.rematerialize: .*'ful'.*'full'"
        ):
            stack(execution=sequential("ful"))

    def test_rejects_layers_that_do_not_divide_into_bodies(self):
        with self.assertRaisesRegex(
            ValueError, r"decoder.execution: Repeat needs .* 2 layers \(moe_every, .* 5"
        ):
            stack(num_layers=5, execution=loop())


def excess_load(x_BLM: tf.Tensor, w_gate: tf.Tensor) -> np.ndarray:
    """Returns E times the load above the mean, for 4 experts and the best two of each token."""
    logits = x_BLM.numpy().reshape(B * L, M) @ w_gate.numpy()
    load = np.bincount(np.argsort(-logits, -1)[:, :2].ravel(), minlength=4)
    return load * 4 - load.sum()


class GradientsTest(testing.TestCase):
    @pytest.mark.slow
    def test_bfloat16_gradients_are_stacked_in_bfloat16(self):
        layer = stack(execution=loop("full"), moe_every=0)

        def narrow(x: tf.Tensor, memory: tf.Tensor, *weights: tf.Tensor) -> list:
            theta = layer.variable_specs().pack(weights)
            source = Memory(tf.cast(memory, tf.bfloat16), tf.ones([B, K], tf.int32))
            with context.scope(training=True, seed=SEED), tf.GradientTape() as tape:
                tape.watch(weights)
                output = layer.fprop(
                    theta, tf.cast(x, tf.bfloat16), tf.ones([B, L], tf.int32), source
                )
                total = tf.reduce_sum(tf.cast(output, tf.float32) * COTANGENT)
            return tape.gradient(total, weights)

        tensors = (*inputs(), *layer.init(1).flatten())
        compiled = tf.function(narrow, jit_compile=True, autograph=False)
        text = compiled.experimental_get_compiler_ir(*tensors)(stage="hlo")
        backward = next(line for line in text.splitlines()[::-1] if " while(" in line)
        hidden, scales = "[4,16,24]", "[4,16]"
        self.assertIn(f"bf16{hidden}", backward)
        self.assertIn(f"f32{scales}", backward)
        in_graph = tf.function(narrow, autograph=False)
        for gradient, one_by_one in zip(in_graph(*tensors), narrow(*tensors), strict=True):
            self.assertEqual(gradient.dtype, tf.float32)
            assert_close(gradient, one_by_one, "bfloat16")

    def check_update_rules(self, policy):
        """Checks what update rules get in one loop, and in remat units one after another."""
        moe = MixtureOfExperts.params().set(model_dim=M, hidden_dim=8, num_experts=4, group_size=8)
        moe.set(router=SigmoidRouter.params())
        repeated = loop(policy).set(body=(moe,), times=2).instantiate(path="layers")
        theta, (x, _) = repeated.init(1), inputs()
        mask = tf.ones([B, L], tf.int32)

        def reported(run) -> list:
            biases = theta.body[0].router.selection_bias
            with context.scope(training=True, seed=SEED) as scope, tf.GradientTape() as tape:
                tape.watch(biases)
                output = run()
                total = tf.add_n([tf.reduce_sum(output * COTANGENT), *scope.losses.values()])
            return tape.gradient(total, biases)

        def in_remat_units() -> tf.Tensor:
            y = x
            for layer, layer_theta in repeated.unrolled(theta):

                def body(y, mask, *weights, layer=layer, like=layer_theta):
                    return layer.fprop(like.pack(weights), y, mask)

                y = rematerialized(body, policy, [y, mask], layer_theta.flatten())
            return y

        expected, y = [], x
        for layer, layer_theta in repeated.unrolled(theta):
            expected.append(excess_load(y, layer_theta.router.w_gate))
            with context.scope(training=True, seed=SEED):
                y = layer.fprop(layer_theta, y, mask)
        self.assertTrue(np.any(expected[0]))
        self.assertFalse(np.array_equal(expected[0], expected[1]))
        for run in (lambda: repeated.fprop(theta, x, mask), in_remat_units):
            found = tf.function(lambda run=run: reported(run), autograph=False)()
            self.assertAllEqual(found, expected)

    def test_update_rules_get_the_values_of_their_own_layer(self):
        self.check_update_rules("none")

    @pytest.mark.slow
    def test_update_rules_get_the_values_of_their_own_layer_when_all_is_recomputed(self):
        self.check_update_rules("full")


if __name__ == "__main__":
    testing.main()
