# tests: wings/dropless/sorted_experts.py, wings/kernels/grouped.py, wings/dropless/expert_blocks.py
"""Tests that dropless experts compute the same with the grouped products of a platform."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.remat_unit import rematerialized
from lingvo_gshard.core.kernel_use import KernelUse
from lingvo_gshard.layers.moe import MixtureOfExperts, Top2Router
from lingvo_gshard.layers.products import ProductContext
from lingvo_gshard.sharding import annotate, annotate_like
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.hlo.operations import collective_calls
from lingvo_gshard.wings.low_precision.rounding import ROUNDINGS
from lingvo_gshard.wings.planning.machines import compilers, topologies
from tests.kernels import programs

B, L, M, H, E = 8, 16, 128, 160, 8
# Sizes of the layer that is compiled for real devices.
M2, H2 = 512, 1024
USED = KernelUse("moe", "grouped products")


def make_layer(sizes=(M, H, E), **values):
    model_dim, hidden_dim, experts = sizes
    params = MixtureOfExperts.params().set(
        model_dim=model_dim,
        hidden_dim=hidden_dim,
        num_experts=experts,
        group_size=L,
        dispatch=DroplessDispatch.params(),
        router=Top2Router.params().set(capacity_factor=0.0),
    )
    for name, value in values.items():
        params.set_path(name.replace("__", "."), value)
    return params.instantiate(path="moe")


def program(
    layer, mesh, strategy, platform, policy="none", dtype="float32", shape=(B, L), rounding=""
):
    """Returns the program of the layer's output and all gradients."""
    specs = layer.variable_specs()
    sizes = (*shape, layer.p.model_dim)

    def step(x, *weights):
        sources = [annotate(x, "BLM"), *map(annotate_like, weights, specs.flatten())]

        def forward(x, *weights):
            return layer.fprop(specs.pack(weights), x, tf.ones(shape, tf.int32))

        scope = context.scope(training=True, seed=tf.constant([1, 0]))
        rounded = context.override_extension(ProductContext, rounding=ROUNDINGS.get(rounding))
        with tf.GradientTape() as tape, scope, rounded:
            tape.watch(sources)
            if policy == "none":
                y = forward(*sources)
            else:
                y = rematerialized(forward, policy, sources[:1], sources[1:])
            factors = np.cos(np.arange(np.prod(sizes))).reshape(sizes)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) * factors)
        found = [y, *tape.gradient(loss, sources)]
        return [(str(i), value, None) for i, value in enumerate(found)]

    partitioning = Partitioning.make(mesh, strategy).on(platform)
    named = [("x", sizes, "BLM", dtype)]
    named += [(f"w{i}", tuple(s.shape), s.layout, "float32") for i, s in enumerate(specs.flatten())]
    return programs.lowered(step, named, partitioning)


def results(layer, made):
    """Returns what a program computes from noise, and weights with noise."""
    generator = np.random.default_rng(1)
    arrays = [generator.normal(size=(B, L, M)).astype(np.float32)]
    for weight in layer.init(1).flatten():
        noise = 0.1 * generator.normal(size=weight.shape)
        arrays.append(np.asarray(weight) + noise.astype(np.float32))
    return programs.run(made, arrays)[0]


class ExpertsTest(testing.TestCase, parameterized.TestCase):
    def fused(self, layer, mesh, strategy, platform, policy="none", rounding=""):
        """Returns output and gradients by kernels."""
        made = program(layer, mesh, strategy, platform, policy, rounding=rounding)
        self.assertEqual(made.kernels, (USED,))
        return results(layer, made)

    def plain(self, layer, rounding=""):
        """Returns output and gradients of one device without kernels."""
        made = program(layer, "data=1", "replicated", "", rounding=rounding)
        self.assertEqual(made.kernels, ())
        return results(layer, made)

    def check(self, layer, mesh, strategy, platform, policy="none"):
        found, expected = self.fused(layer, mesh, strategy, platform, policy), self.plain(layer)
        for one, other in zip(found, expected, strict=True):
            self.assertAllClose(one, other, rtol=0, atol=3e-6 * np.abs(other).max())

    @parameterized.parameters(
        ("fp8_blocks", "cuda_interpreted", "data=1", "replicated"),
        ("int8", "tpu_interpreted", "data=8", "expert"),
    )
    def test_rounded_experts(self, rounding, platform, mesh, strategy):
        """Sums in another order may round a few hidden activations to the next number."""
        layer = make_layer(experts__activation="swiglu")
        found = self.fused(layer, mesh, strategy, platform, "full", rounding)
        rounded, exact = self.plain(layer, rounding), self.plain(layer)
        for one, other, wide in zip(found, rounded, exact, strict=True):
            largest = np.abs(other).max()
            differences = np.abs(one - other) / largest
            self.assertLess(np.mean(differences > 3e-6), 0.05)
            self.assertLess(differences.max(), 0.01)
            self.assertGreater(np.abs(one - wide).max() / largest, 2e-3)

    @pytest.mark.slow
    def test_experts_on_eight_devices_equal_those_of_one(self):
        self.check(make_layer(), "data=8", "expert", "tpu_interpreted")

    @parameterized.parameters(
        ("data=1", "replicated", "tpu_interpreted", "none"),
        ("data=4,model=2", "data_tensor", "tpu_interpreted", "products"),
        ("data=4,model=2", "expert_tensor", "cuda_interpreted", "products_but_hidden"),
        ("data=8", "expert", "cuda_interpreted", "full"),
    )
    @pytest.mark.slow
    def test_gated_experts_with_biases_and_remat(self, mesh, strategy, platform, policy):
        layer = make_layer(experts__activation="swiglu", experts__use_bias=True)
        self.check(layer, mesh, strategy, platform, policy)

    @pytest.mark.slow
    def test_bounded_exchange(self):
        """A bound that drops no row leaves the results as they are."""
        layer = make_layer(dispatch__bound=8.0)
        self.check(layer, "data=8", "expert", "tpu_interpreted")

    def test_programs_say_whether_they_call_xlas_ragged_exchange(self):
        """XLA has wrong gradients where it overlaps one with others, so options depend on it."""
        layer = make_layer(dispatch__exchange="ragged")
        exchanges = program(layer, "data=4", "expert", "cuda")
        alone = program(make_layer(), "data=4", "expert", "cuda")
        self.assertTrue(exchanges.calls("ragged_all_to_all", "cuda"))
        self.assertFalse(alone.calls("ragged_all_to_all", "cuda"))

    def test_a_layer_without_a_kernel_says_why(self):
        made = program(make_layer((64, 64, 2)), "data=1", "replicated", "tpu")
        (use,) = made.kernels
        self.assertIn("fewer than 128 columns", use.obstacle)


@pytest.mark.slow
class CompiledTest(testing.TestCase, parameterized.TestCase):
    def compile(self, name, strategy, rounding="", **values):
        """Returns the operations of a layer of gated experts, compiled for devices of a kind."""
        topology = topologies.get(name)
        kind = topology.chip.kind
        if compilers.available(kind) != kind:
            self.skipTest(f"the compiler for {kind} is not installed")
        devices = topology.compile_devices()
        count = len(devices)
        values = {"experts__activation": "swiglu", **values}
        layer = make_layer((M2, H2, count), group_size=2048, **values)
        platform = "tpu" if kind == "tpu" else "cuda"
        shape = (4 * count, 2048)
        mesh = f"data={count}"
        made = program(layer, mesh, strategy, platform, "none", "bfloat16", shape, rounding)
        compiled = made.lower(devices).compile()
        layers = frozenset({"moe", "moe/router", "moe/experts"})
        return hlo.read_operations(hlo.read_module(compiled), made.mesh, layers).operations

    @parameterized.parameters(*programs.TPUS, *programs.GPUS)
    def test_compiled_experts_are_kernels_without_loops(self, name):
        operations = self.compile(name, "data")
        grouped = [each for each in operations if each.is_grouped]
        # A product forward and two gradients, for each of three weights. On TPUs, the gradients of
        # the rows for two of the weights are one kernel.
        expected = [1] * 9 if name.startswith("gpu") else [1] * 7 + [2]
        self.assertEqual({each.times for each in grouped}, {1})
        # Two experts for each of a device's 8,192 tokens.
        one = 2 * 16384 * M2 * H2
        counts = sorted(each.matmul_flops / one for each in grouped)
        self.assertLen(counts, len(expected))
        for count, wanted in zip(counts, expected, strict=True):
            self.assertBetween(count / wanted, 1.0, 1.1)
        self.assertEqual({each.dtype for each in grouped}, {"bfloat16"})
        others = [each for each in operations if each.layer == "moe/experts" and each.matmul_flops]
        self.assertCountEqual(others, grouped)

    @parameterized.parameters(
        *("relu", "gelu", "gelu_tanh", "tanh", "geglu", "geglu_tanh", "reglu", "glu", "bilinear"),
        "clamped_swiglu",
    )
    def test_kernels_for_tpus_compute_the_activation(self, activation):
        """Swiglu is tested above. No operation beside kernels reads and writes hidden rows."""
        operations = self.compile("v5e:2x2", "data", experts__activation=activation)
        read_and_written = 2 * 16384 * H2 * 2
        others = [
            each for each in operations if each.layer == "moe/experts" and not each.is_grouped
        ]
        self.assertLess(max(each.bytes for each in others), read_and_written)

    @parameterized.parameters(
        ("v5e:2x2", "int8", ("int8", "int8")),
        ("v5p:2x2x1", "int8", ("int8", "int8")),
        ("tpu7x:2x2x1", "fp8", ("float8_e4m3fn", "float8_e5m2")),
        ("gpu:h100:1x4", "fp8", ("float8_e4m3fn", "float8_e5m2")),
        ("gpu:h100:1x4", "fp8_blocks", ("float8_e4m3fn", "float8_e4m3fn")),
        ("gpu:b200:1x4", "fp8", ("float8_e4m3fn", "float8_e5m2")),
    )
    def test_products_and_gradients_of_rows_are_of_8_bits(self, name, rounding, expected):
        operations = self.compile(name, "data", rounding)
        found = [each.dtype for each in operations if each.is_grouped]
        forward, backward = expected
        self.assertCountEqual(found, [forward] * 3 + [backward] * 3 + ["bfloat16"] * 3)

    @parameterized.parameters(*programs.TPUS, *programs.GPUS)
    def test_the_exchange_sends_the_rows_that_there_are(self, name):
        operations = self.compile(name, "expert", dispatch__bound=1.25, dispatch__exchange="ragged")
        calls = collective_calls(operations)
        ragged = [call for call in calls if call.kind == "ragged-all-to-all"]
        # To the experts and back, forward and backward.
        self.assertLen(ragged, 4)
        # Two rows of bfloat16 for each of a device's 8,192 tokens.
        self.assertEqual({call.bytes for call in ragged}, {16384 * M2 * 2})
        self.assertNotIn("all-to-all", {call.kind for call in calls})
        kernels = 9 if name.startswith("gpu") else 8
        self.assertLen([each for each in operations if each.is_grouped], kernels)

    def exchanged(self, exchange):
        """Returns the bytes of collectives by kind for eight H100, router's gradient left out."""
        values = {"dispatch__bound": 1.25, "dispatch__exchange": exchange}
        operations = self.compile("gpu:h100:1x8", "expert", **values)
        self.assertLen([each for each in operations if each.is_grouped], 9)
        found = collections.defaultdict(list)
        for call in collective_calls(operations):
            found[call.kind].append(call.bytes)
        # Gradients of the router's weights, which are gathered before.
        self.assertLess(sum(found.pop("all-reduce")), 1 << 15)
        return found

    def test_gpus_gather_tokens_and_scatter_sums(self):
        found = self.exchanged("")
        rows = 65536 * M2 * 2
        self.assertCountEqual(found, ["all-gather", "reduce-scatter"])
        # Tokens, and gradients of their sums. Expert and gate of a token's two choices are 16
        # bytes.
        self.assertEqual(sum(1 for size in found["all-gather"] if size >= rows), 2)
        self.assertBetween(sum(found["all-gather"]), 2 * rows, 2 * rows + 65536 * 16 + (1 << 15))
        # Sums, the gradients of tokens, and of the gates.
        self.assertBetween(sum(found["reduce-scatter"]), 2 * rows, 2 * rows + 65536 * 8)

    def test_gpus_exchange_buffers_of_the_bound(self):
        found = self.exchanged("fixed")
        # To the experts and back, forward and backward; and the loads of eight experts.
        rows = 16384 * 5 // 4 * M2 * 2
        self.assertCountEqual(found["all-to-all"], [rows] * 4 + [8 * 4])
        self.assertNotIn("ragged-all-to-all", found)


if __name__ == "__main__":
    testing.main()
