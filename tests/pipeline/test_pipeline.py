# tests: wings/pipeline/pipeline.py, wings/pipeline/pipeline_loop.py
# tests: wings/pipeline/pipeline_operands.py, layers/token_context.py, layers/stacks/batch_parts.py
# tests: wings/spmd_passes/whole_tables.py
"""Compares pipelines and interleaved parts of batches with layers run on each part alone."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import Memory, TransformerLayer
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.fine_tuning.surgery import conversion
from lingvo_gshard.wings.fine_tuning.surgery.expert_use import metric_vector
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.long_inputs.ring import RingKernel
from lingvo_gshard.wings.pipeline.pipeline_operands import Schedule
from lingvo_gshard.wings.published_layers.routers import HashRouter, SigmoidRouter
from tests.layers.stacks.executions import loop, pipeline, sequential
from tests.layers.stacks.stepwise import run_stepwise

B, L, K, M = 6, 4, 3, 8
COTANGENT = np.random.default_rng(5).normal(size=(B, L, M)).astype(np.float32)
SEED = tf.constant([3, 4])


def stack(**values: object) -> TransformerStack:
    p = TransformerStack.params().set(num_layers=4, model_dim=M, num_heads=2, hidden_dim=12)
    moe = MixtureOfExperts.params().set(num_experts=2, group_size=L)
    p.set(moe=moe, residual_dropout_rate=0.1, attention_dropout_rate=0.1)
    return p.set(**values).instantiate(path="decoder")


def inputs() -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(0)
    x, memory = (tf.constant(rng.normal(size=(B, n, M)), tf.float32) for n in (L, K))
    segments = tf.constant(rng.integers(0, 3, size=(B, L)), tf.int32)
    return {
        "x": x,
        "segments": segments,
        "memory": memory,
        "cotangent": tf.constant(COTANGENT),
        "ids": tf.constant(rng.integers(0, 9, size=(B, L)), tf.int32),
    }


def one_pass(layer: TransformerStack, batch: dict, theta, seed=SEED, share=1.0) -> dict:
    """Returns the results of a training pass; share: weight of the losses that layers add."""
    sources = (batch["x"], batch["memory"], *theta.flatten())
    with context.scope(training=True, seed=seed) as scope, tf.GradientTape() as tape:
        tape.watch(sources)
        memory = None
        if layer.p.is_decoder:
            ones = tf.ones(batch["memory"].shape[:2], tf.int32)
            memory = Memory(batch["memory"], ones)
        with token_context.tokens(batch["ids"]):
            output = layer.fprop(theta, batch["x"], batch["segments"], memory)
        total = tf.add_n([tf.zeros([]), *scope.losses.values()]) * share
        total += tf.reduce_sum(output * batch["cotangent"])
    return {
        "output": output,
        "losses": tf.add_n([tf.zeros([]), *scope.losses.values()]),
        "metrics": {name: value for name, (value, _) in scope.metrics.items()},
        "weights": {name: weight for name, (_, weight) in scope.metrics.items()},
        "gradients": tape.gradient(total, sources, unconnected_gradients="zero"),
    }


def by_name(layer: TransformerStack, found: dict) -> dict:
    """Returns the results of a pass, with gradients keyed by the names of the layers' weights."""
    x, memory, *weights = found["gradients"]
    named = {"x": x, "memory": memory}
    for spec, gradient in zip(layer.variable_specs().flatten(), weights, strict=True):
        slices = tf.reshape(gradient, [-1, *spec.shape[spec.stacked :]])
        named.update(zip(spec.slices or [spec.path], slices, strict=True))
    metrics, weights = (
        dict(zip(*metric_vector(found[part].items()), strict=True))
        for part in ("metrics", "weights")
    )
    return {**found, "gradients": named, "metrics": metrics, "weights": weights}


def of_micro_batches(count: int, **values: object) -> dict:
    """Returns the combined results of layers run one by one on each micro-batch alone."""
    layer = stack(**values)
    theta, parts = layer.init(1), []
    for i in range(count):
        rows = {name: value[i::count] for name, value in inputs().items()}
        seed = random_numbers.hashed_fold_in_word(SEED, i)
        parts.append(by_name(layer, one_pass(layer, rows, theta, seed, share=1 / count)))
    together = {"output": interleaved([part["output"] for part in parts])}
    together["losses"] = np.mean([part["losses"] for part in parts])
    together["metrics"] = {}
    for name in parts[0]["metrics"]:
        values, weights = ([part[kind][name] for part in parts] for kind in ("metrics", "weights"))
        together["metrics"][name] = np.average(values, weights=weights)
    together["gradients"] = {
        name: interleaved([part["gradients"][name] for part in parts])
        if name in ("x", "memory")
        else tf.add_n([part["gradients"][name] for part in parts])
        for name in parts[0]["gradients"]
    }
    # Losses are means over micro-batches, but what update rules get is a sum.
    for name in filter(lambda name: name.endswith("selection_bias"), together["gradients"]):
        together["gradients"][name] *= count
    return together


def interleaved(parts: list[tf.Tensor]) -> tf.Tensor:
    return tf.reshape(tf.stack(parts, 1), [B, *parts[0].shape[1:]])


def in_stages(jit_compile: bool | None = None, **values: object) -> dict:
    layer = stack(**values)

    def run(batch: dict, *weights: tf.Tensor) -> dict:
        return one_pass(layer, batch, layer.variable_specs().pack(weights))

    if jit_compile is not None:
        run = tf.function(run, jit_compile=jit_compile, autograph=False)
    return by_name(layer, run(inputs(), *layer.init(1).flatten()))


MIXED = {"is_decoder": True, "execution": pipeline(2, micro_batches=3)}
DENSE = {"moe_every": 0, "execution": pipeline(2, circulations=2)}


DENSE_WITHOUT_DROPOUT = {
    "moe_every": 0,
    "residual_dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
}
UNEVEN = {**DENSE_WITHOUT_DROPOUT, "num_layers": 3, "execution": pipeline(2)}


def arrays_of(theta) -> dict[str, np.ndarray]:
    return {path: np.asarray(array) for path, array in theta.flatten_items()}


def mixed(**values: object) -> dict:
    execution = MIXED["execution"].copy().set(**values)
    return {**MIXED, "execution": execution}


NEAR = SelfAttention.params().set(window=2, use_sinks=True)
ALTERNATING = {
    "attention_pattern": (NEAR, SelfAttention.params()),
    "moe_every": 0,
    "execution": pipeline(2),
}
HASHED = MixtureOfExperts.params().set(num_experts=2, group_size=L, router=HashRouter.params())
BIASED = MixtureOfExperts.params().set(num_experts=2, group_size=L, router=SigmoidRouter.params())


def with_kernel(kernel: Params) -> Params:
    layer = TransformerLayer.params()
    layer.self_attention.kernel = kernel
    return layer


def without_stages(values: dict) -> dict:
    return {name: value for name, value in values.items() if name != "execution"}


class ResultsTest(testing.TestCase, parameterized.TestCase):
    def assert_same(self, actual: dict, expected: dict) -> None:
        assert_close(actual["output"], expected["output"], "order")
        assert_close(actual["losses"], expected["losses"], "order")
        for part in ("metrics", "gradients"):
            self.assertEqual(set(actual[part]), set(expected[part]))
            for name, value in expected[part].items():
                assert_close(actual[part][name], value, "order")


class InterleavedTest(ResultsTest):
    @parameterized.named_parameters(
        ("sequential_recomputed", sequential("full", 3), {}),
        ("update_rules", loop("none", 3), {"moe": BIASED}),
    )
    def test_eager_parts_equal_layers_on_each_part_alone(self, execution, values):
        values = {"is_decoder": True, **values}
        self.assert_same(in_stages(**values, execution=execution), of_micro_batches(3, **values))

    @parameterized.named_parameters(
        ("sequential", sequential("none", 3), {}),
        ("loop", loop("none", 3), {}),
        ("token_ids", sequential("none", 3), {"moe": HASHED, "has_token_ids": True}),
    )
    @pytest.mark.slow
    def test_other_eager_parts_equal_layers_on_each_part_alone(self, execution, values):
        values = {"is_decoder": True, **values}
        self.assert_same(in_stages(**values, execution=execution), of_micro_batches(3, **values))

    @parameterized.named_parameters(
        ("sequential", sequential("none", 3)),
        ("sequential_recomputed", sequential("products", 3)),
        ("loop", loop("none", 3)),
        ("loop_recomputed", loop("products_but_hidden", 3)),
    )
    @pytest.mark.slow
    def test_compiled_parts_equal_layers_on_each_part_alone(self, execution):
        found = in_stages(True, is_decoder=True, execution=execution)
        self.assert_same(found, of_micro_batches(3, is_decoder=True))

    def test_evaluation_computes_whole_batches(self):
        layers = [stack(execution=sequential("none", parts)) for parts in (1, 4)]
        batch, theta = inputs(), layers[0].init(1)
        found = [layer.fprop(theta, batch["x"], batch["segments"]) for layer in layers]
        self.assertAllEqual(*found)

    def test_training_rejects_rows_that_do_not_divide(self):
        layer = stack(execution=loop("none", 4))
        with self.assertRaisesRegex(
            ValueError, "decoder.execution.interleaved=4 does not divide the 6 rows"
        ):
            one_pass(layer, inputs(), layer.init(1))

    def test_a_pipeline_names_its_own_option(self):
        with self.assertRaisesRegex(ValueError, "interleaved=2: a Pipeline .*micro_batches"):
            stack(execution=pipeline(2, interleaved=2))


class PipelineTest(ResultsTest):
    @parameterized.named_parameters(
        ("experts", 3, MIXED),
        ("circulations", 2, DENSE),
        ("update_rules", 3, {**MIXED, "moe": BIASED}),
    )
    def test_eager_stages_equal_layers_one_by_one(self, count, values):
        self.assert_same(in_stages(**values), of_micro_batches(count, **without_stages(values)))

    @pytest.mark.slow
    def test_eager_stages_with_token_ids_equal_layers_one_by_one(self):
        values = {**MIXED, "moe": HASHED, "has_token_ids": True}
        self.assert_same(in_stages(**values), of_micro_batches(3, **without_stages(values)))

    @parameterized.named_parameters(
        (
            "circulations",
            True,
            3,
            {**DENSE, "execution": pipeline(2, circulations=2, micro_batches=3)},
        ),
        ("experts", True, 3, MIXED),
        ("full", True, 3, mixed(rematerialize="full")),
        ("circulations_of_experts", True, 3, {**mixed(circulations=2), "num_layers": 8}),
        (
            "loops_in_stages",
            True,
            3,
            {**mixed(rematerialize="products_but_hidden"), "num_layers": 8},
        ),
        ("one_micro_batch", True, 1, mixed(micro_batches=1)),
        ("token_ids", True, 3, {**MIXED, "moe": HASHED, "has_token_ids": True}),
        ("update_rules", True, 3, {**MIXED, "moe": BIASED}),
        ("alternating", True, 2, ALTERNATING),
        ("not_compiled", False, 3, MIXED),
    )
    @pytest.mark.slow
    def test_compiled_stages_equal_layers_one_by_one(self, jit_compile, count, values):
        expected = of_micro_batches(count, **without_stages(values))
        self.assert_same(in_stages(jit_compile, **values), expected)

    @parameterized.named_parameters(
        ("eager", None, UNEVEN),
        ("eager_circulations", None, {**DENSE_WITHOUT_DROPOUT, **DENSE, "num_layers": 7}),
    )
    def test_layers_that_do_not_divide_run_before_the_stages(self, jit_compile, values):
        expected = in_stages(**{**values, "execution": sequential()})
        self.assert_same(in_stages(jit_compile, **values), expected)

    @parameterized.parameters("none", "products", "full")
    @pytest.mark.slow
    def test_compiled_layers_that_do_not_divide_run_before_the_stages(self, policy):
        execution = UNEVEN["execution"].copy().set(rematerialize=policy)
        expected = in_stages(**{**UNEVEN, "execution": sequential()})
        self.assert_same(in_stages(True, **{**UNEVEN, "execution": execution}), expected)

    def test_layers_before_the_stages_keep_their_names(self):
        stages, layers = stack(**UNEVEN), stack(**{**UNEVEN, "execution": sequential()})
        specs = stages.variable_specs().layers
        self.assertEqual(
            specs.first[0].feed_forward.w_in.path, "decoder.layers[0].feed_forward.w_in"
        )
        self.assertEqual(specs.body[0].feed_forward.w_in.shape[:2], (2, 1))
        self.assertLen(stages.layers_in_order(), 3)
        self.assertEqual([times for _, times in stages.layer_counts()], [1, 2])
        theta, expected = stages.init(1), layers.init(1)
        unrolled = [weights for _, weights in stages.unrolled(theta)]
        self.assertAllClose(unrolled, expected.layers, rtol=0, atol=0)

    def test_whole_periods_run_before_the_stages(self):
        """Five periods of a layer with and one without experts: one period, and two stages."""
        layer = stack(num_layers=10, execution=pipeline(2))
        specs = layer.variable_specs().layers
        self.assertLen(specs.first, 2)
        self.assertEqual(
            specs.body[1].feed_forward.experts.w_in.slices,
            tuple(f"decoder.layers[{i}].feed_forward.experts.w_in" for i in (3, 5, 7, 9)),
        )

    def test_a_checkpoint_reads_into_other_stages(self):
        """Layers one by one, stages of one and of two layers, and back."""
        layers = stack(**{**UNEVEN, "num_layers": 5, "execution": sequential()})
        arrays = layers.init(1)
        names = conversion.by_name(layers.variable_specs(), arrays_of(arrays))
        for stages in (2, 4, 3):
            other = stack(**{**UNEVEN, "num_layers": 5, "execution": pipeline(stages)})
            specs = other.variable_specs()
            made = conversion.make(specs, lambda name, *_: names[name], seed=7)
            self.assertAllClose(
                [weights for _, weights in other.unrolled(made.transform(tf.constant))],
                arrays.layers,
                rtol=0,
                atol=0,
            )
            again = conversion.by_name(specs, arrays_of(made))
            self.assertEqual(set(again), set(names))
            for name, array in again.items():
                self.assertAllEqual(array, names[name])

    def test_initial_weights_and_their_order_equal_those_of_layers_one_by_one(self):
        stages, layers = stack(**DENSE, num_layers=8), stack(moe_every=0, num_layers=8)
        theta, expected = stages.init(1), layers.init(1)
        spec = stages.variable_specs().layers.body[0].feed_forward.w_in
        self.assertEqual((spec.layout, spec.shape), ("PRMH", (2, 4, M, 12)))
        numbers = [0, 1, 4, 5, 2, 3, 6, 7]
        self.assertEqual(
            spec.slices, tuple(f"decoder.layers[{i}].feed_forward.w_in" for i in numbers)
        )
        layers = [weights for _, weights in stages.unrolled(theta)]
        self.assertAllClose(layers, expected.layers, rtol=0, atol=0)

    def test_evaluation_pads_rows_that_do_not_divide(self):
        values = {"moe_every": 0}
        stages, layers = stack(**values, execution=pipeline(4)), stack(**values)
        batch = inputs()
        outputs = [
            layer.fprop(layer.init(1), batch["x"], batch["segments"]) for layer in (stages, layers)
        ]
        assert_close(*outputs, "order")

    @pytest.mark.slow
    def test_decoding_equals_layers_one_by_one(self):
        results = []
        for values in ({"execution": pipeline(2)}, {}):
            layer = stack(is_decoder=True, **values)
            theta, batch = layer.init(1), inputs()
            source = Memory(batch["memory"], tf.ones([B, K], tf.int32))
            results.append(run_stepwise(layer, theta, batch["x"][:, :2], source))
        self.assertAllEqual(*results)

    def test_layers_are_observed_by_their_names_without_stages(self):
        layer, seen = stack(**DENSE), []
        batch = inputs()
        with context.scope(on_output=lambda path, _: seen.append(path)):
            layer.fprop(layer.init(1), batch["x"], batch["segments"])
        self.assertEqual(seen.count("decoder.layers[3].feed_forward"), 2)


class ScheduleTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters((4, 8, 1), (4, 2, 1), (3, 3, 2), (2, 5, 3))
    def test_micro_batches_pass_the_stages_in_order_one_at_a_time(
        self, stages, micro_batches, circulations
    ):
        schedule = Schedule(stages, micro_batches, circulations)
        used = schedule.busy_ticks()
        self.assertEqual(used.shape, (circulations, stages, micro_batches))
        self.assertEqual(used.max(), schedule.ticks - 1)
        self.assertTrue((np.diff(used.reshape(-1, micro_batches), axis=0) > 0).all())
        for stage in range(stages):
            ticks = used[:, stage].ravel()
            self.assertEqual(len(set(ticks)), len(ticks))
            self.assertAllClose(
                1 - len(ticks) / schedule.ticks, schedule.idle_share, rtol=1e-6, atol=1e-12
            )
        for tick in range(schedule.ticks):
            t = tf.constant(tick)
            now, newest = schedule.circulation(t).numpy(), schedule.newest_circulation(t).numpy()
            self.assertContainsSubset(now, {newest, newest - 1})
            for circulation, stage, micro_batch in np.argwhere(used == tick):
                self.assertEqual(schedule.micro_batch(t)[stage], micro_batch)
                self.assertEqual(now[stage], circulation)


class ErrorsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"execution": pipeline(3)}, "decoder.execution.stages=3 .*: 2 times 2 layers .*few for 3"),
        (
            {**DENSE, "execution": pipeline(2, circulations=2, micro_batches=1)},
            "decoder.execution.micro_batches: 1; 2 or more",
        ),
        (
            {"execution": pipeline(2), "num_layers": 5},
            "decoder.execution: Pipeline needs .*moe_every.* 5",
        ),
        (
            {
                "execution": pipeline(2),
                "moe": HASHED.copy().set(dispatch=DroplessDispatch.params()),
            },
            "decoder.execution: a Pipeline .*moe.dispatch=DroplessDispatch; choose Gather",
        ),
        (
            {"execution": pipeline(2), "layer": with_kernel(BlockwiseKernel.params())},
            "decoder.execution: .* self_attention.kernel=BlockwiseKernel; choose DenseKernel",
        ),
        (
            {"execution": pipeline(2), "layer": with_kernel(RingKernel.params())},
            "decoder.execution: .* self_attention.kernel=RingKernel; choose DenseKernel",
        ),
    )
    def test_errors_name_the_option(self, values, message):
        with self.assertRaisesRegex(ValueError, message):
            stack(**{"has_token_ids": True, **values})

    def test_rejects_stages_that_do_not_divide_over_devices(self):
        layer = stack(moe_every=0, execution=pipeline(2))
        batch, partitioning = inputs(), Partitioning.make("stage=4", "pipeline")
        message = "decoder.execution.stages=2 .* 4 devices along stage of `mesh=stage=4`"
        with use_partitioning(partitioning), self.assertRaisesRegex(ValueError, message):
            layer.fprop(layer.init(1), batch["x"], batch["segments"])

    def test_training_rejects_rows_that_do_not_divide(self):
        layer = stack(moe_every=0, execution=pipeline(4))
        with self.assertRaisesRegex(
            ValueError, "decoder.execution.micro_batches=4 .*batch_rows, 6 rows"
        ):
            one_pass(layer, inputs(), layer.init(1))


if __name__ == "__main__":
    testing.main()
