# tests: wings/kernels/layers/fused_attention.py, layers/attention/kernel.py
# tests: wings/kernels/kernel.py, wings/kernels/splicing.py, core/kernel_use.py
"""Tests that programs for devices with kernels compute what those without compute."""

import re

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.kernel_use import KernelUse, uses_in_words
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.kernel import PLAIN, SoftmaxOptions
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.attention.relative_bias import DistanceBuckets, RelativeBias
from lingvo_gshard.layers.dropout import DropoutMask
from lingvo_gshard.runtime import partitioning_log
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.long_inputs.ulysses import UlyssesKernel
from tests.kernels import compiled_attention, programs

B, N, L, D = 4, 4, 160, 64
LAYOUTS = ("BNLD", "BNKD", "BNKD", "BL")


def attention_step(query, keys, values, segments, softmax=PLAIN, kernel=DenseKernel):
    """Returns the gradients of a loss of causal attention over packed rows, and the output."""
    kernel = kernel.params().instantiate()
    mask = kernel.prepare(AttentionMask(segments, is_causal=True))
    bias = softmax.relative_bias
    sources = [query, keys, values, *([] if bias is None else [bias.table_bN])]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        marked = [annotate(x, layout) for x, layout in zip(sources[:3], LAYOUTS[:3], strict=True)]
        mixed = kernel.attend(*marked, mask, softmax)
        loss = tf.reduce_sum(tf.where(segments[:, None, :, None] > 0, mixed, 0.0) ** 2)
    gradients = tape.gradient(loss, sources)
    layouts = [*LAYOUTS[:3], "_N"]
    named = zip(("query", "keys", "values", "table"), gradients, layouts, strict=False)
    return [(name, annotate(x, layout), None) for name, x, layout in named]


def ulysses_step(*tensors):
    """Returns the results of `attention_step` whose devices exchange positions for heads."""
    return attention_step(*tensors, kernel=UlyssesKernel)


def dropping_step(*tensors):
    """Returns the results of `attention_step` with 30% of the weights dropped."""
    return attention_step(*tensors, SoftmaxOptions(dropout=DropoutMask(0.3, tf.constant([3, -9]))))


def biased_step(*tensors):
    """Returns the results of `attention_step` with a learned bias, and the bias' gradient."""
    table_bN = tf.constant(np.random.default_rng(2).normal(size=(8, N)).astype(np.float32))
    bias = RelativeBias(DistanceBuckets(8, 40, True), table_bN)
    return attention_step(*tensors, SoftmaxOptions(relative_bias=bias))


def program(mesh, strategy, platform, shared=N, step=attention_step, partitioner="gspmd"):
    """Returns the program of `attention_step` for a mesh of CPUs."""
    partitioning = Partitioning.make(mesh, strategy).on(platform)
    shapes = [(B, N, L, D), (B, shared, L, D), (B, shared, L, D), (B, L)]
    dtypes = (*["float32"] * 3, "int32")
    named = list(zip(("q", "k", "v", "segments"), shapes, LAYOUTS, dtypes, strict=True))
    return programs.lowered(step, named, partitioning, partitioner)


def values_of(shared=N):
    generator = np.random.default_rng(1)
    shapes = [(B, N, L, D), (B, shared, L, D), (B, shared, L, D)]
    arrays = [generator.normal(size=shape).astype(np.float32) / 4 for shape in shapes]
    return [*arrays, np.sort(generator.integers(1, 4, (B, L)), 1)[:, ::-1].astype(np.int32)]


class ProgramsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("data=1", "replicated", 4, "tpu_interpreted"),
        ("data=2,model=4", "data_tensor", 4, "tpu_interpreted"),
        ("data=2,model=4", "data_tensor", 2, "cuda_interpreted"),
        ("data=8", "data", 1, "cuda_interpreted"),
    )
    def test_gradients_equal_those_without_kernels(self, mesh, strategy, shared, platform):
        """The rows of data=8 do not divide over the devices: 4 rows are left whole."""
        arrays = values_of(shared)
        fused = program(mesh, strategy, platform, shared)
        self.assertEqual(fused.kernels, (KernelUse("", "attention"),))
        plain = program(mesh, strategy, "", shared)
        self.assertEqual(plain.kernels, ())
        found, executable = programs.run(fused, arrays)
        expected, _ = programs.run(plain, arrays)
        self.assertAllClose(found, expected, rtol=0, atol=5e-6)
        if shared % fused.mesh.parts(["model"] if "model" in fused.mesh.names else []) == 0:
            # Sharded rows and heads need no data of other devices.
            self.assertNotIn("all-gather", {call.kind for call in executable.collectives()})

    @parameterized.parameters("tpu_interpreted", "cuda_interpreted")
    def test_sinks_have_a_wider_type_than_activations(self, platform):
        def with_sinks(*tensors):
            *sources, segments = tensors
            narrow = [tf.cast(x, tf.bfloat16) for x in sources]
            softmax = SoftmaxOptions(sinks_N=tf.range(N, dtype=tf.float32))
            found = attention_step(*narrow, segments, softmax)
            return [(name, tf.cast(x, tf.float32), last) for name, x, last in found]

        made = [program("data=2", "data", name, step=with_sinks) for name in (platform, "")]
        found, expected = (programs.run(each, values_of())[0] for each in made)
        self.assertAllClose(found, expected, rtol=0, atol=2e-2)

    @parameterized.parameters(
        ("data=2,model=4", "data_tensor", 4), ("data=2,model=2", "data_tensor", 1)
    )
    def test_devices_drop_the_weights_that_one_device_drops_without_a_kernel(
        self, mesh, strategy, shared
    ):
        arrays = values_of(shared)
        fused = program(mesh, strategy, "cuda_interpreted", shared, step=dropping_step)
        self.assertEqual(fused.kernels, (KernelUse("", "attention"),))
        plain = program("data=1", "replicated", "", shared, step=dropping_step)
        found, executable = programs.run(fused, arrays)
        expected, _ = programs.run(plain, arrays)
        self.assertAllClose(found, expected, rtol=0, atol=5e-6)
        kept = programs.run(program("data=1", "replicated", "", shared), arrays)[0]
        self.assertNotAllClose(kept, expected, rtol=0, atol=1e-2)

    @parameterized.parameters(
        ("data=1", "replicated"), ("data=2,model=4", "data_tensor"), ("data=4,fsdp=2", "fsdp")
    )
    def test_learned_biases_and_their_gradient_equal_those_without_kernels(self, mesh, strategy):
        arrays = values_of()
        fused = program(mesh, strategy, "cuda_interpreted", step=biased_step)
        self.assertEqual(fused.kernels, (KernelUse("", "attention"),))
        plain = program("data=1", "replicated", "", step=biased_step)
        found, _ = programs.run(fused, arrays)
        expected, _ = programs.run(plain, arrays)
        self.assertLen(found, 4)
        for ours, theirs in zip(found, expected, strict=True):
            self.assertAllClose(ours, theirs, rtol=0, atol=5e-6 * max(1, np.abs(theirs).max()))

    @parameterized.product(step=[dropping_step, biased_step])
    def test_only_programs_without_the_kernel_have_an_array_of_weights(self, step):
        weights = re.compile(rf"\b{L}x{L}x")
        for platform, has_weights in (("cuda", False), ("tpu", True), ("", True)):
            made = program("data=1", "replicated", platform, step=step)
            text = str(made.exported().mlir_module())
            self.assertEqual(bool(weights.search(text)), has_weights, platform)

    def test_splash_attention_cannot_drop_weights(self):
        (use,) = program("data=1", "replicated", "tpu", step=dropping_step).kernels
        self.assertEqual(use.obstacle, "Splash attention cannot drop weights")

    def test_a_layer_without_a_kernel_says_why(self):
        (use,) = program("data=1", "replicated", "tpu", step=biased_step).kernels
        self.assertEqual(use.obstacle, "Splash attention has no learned bias")

    def test_layers_with_and_without_kernels_are_described_in_sentences(self):
        uses = [KernelUse(f"layers[{i}]", "attention") for i in range(3)]
        uses.append(KernelUse("bias", "attention", "it has a learned bias"))
        expected = [
            "the platform's kernel computes the attention of layers[0] and 2 more",
            "no kernel computes the attention of bias: it has a learned bias",
        ]
        self.assertEqual(uses_in_words(uses), expected)

    @parameterized.parameters(
        ("packed", "NVIDIA H100 80GB HBM3", True),
        # cuDNN computes it already, cannot drop weights as we do, and knows no segments.
        ("segments", "NVIDIA H100 80GB HBM3", False),
        ("dropped", "NVIDIA H100 80GB HBM3", False),
        ("packed", "NVIDIA A100-SXM4-80GB", False),
    )
    def test_a_layer_says_when_a_limit_of_segments_would_help(self, mask, device_kind, is_advised):
        made = compiled_attention.program("data", 1, mask, "cuda", device_kind)
        (line,) = uses_in_words(made.kernels)
        self.assertEqual("input.most_segments" in line, is_advised)

    def test_the_log_of_a_compiled_step_says_which_layers_use_kernels(self):
        made = program("data=1", "replicated", "tpu_interpreted")
        lines = partitioning_log.describe_program(Executable(made, self.devices(1)))
        self.assertIn("the platform's kernel computes the attention of the function", lines)

    def test_an_input_that_splits_positions_keeps_the_dense_attention(self):
        made = program("data=2", "L->data", "tpu")
        (use,) = made.kernels
        self.assertIn("choose RingKernel or UlyssesKernel", use.obstacle)

    @parameterized.product(
        layout=[("data=2,context=4", "data_context"), ("context=2,model=2", "context_tensor")],
        platform=["tpu_interpreted", "cuda_interpreted"],
    )
    def test_devices_that_exchange_positions_for_heads_use_the_kernel(self, layout, platform):
        found = program(*layout, platform, 2, ulysses_step)
        self.assertEqual(found.kernels, (KernelUse("", "attention"),))
        values, executable = programs.run(found, values_of(2))
        expected, _ = programs.run(program(*layout, "", 2), values_of(2))
        self.assertAllClose(values, expected, rtol=0, atol=5e-6)
        self.assertIn("all-to-all", {call.kind for call in executable.collectives()})

    def test_shardy_on_a_mesh_and_platforms_without_kernels_use_none(self):
        self.assertEqual(program("data=2", "data", "tpu", partitioner="shardy").kernels, ())
        self.assertEqual(program("data=2", "data", "cpu").kernels, ())


if __name__ == "__main__":
    testing.main()
