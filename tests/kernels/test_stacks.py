# tests: layers/stacks/execution.py, wings/repeat/loop.py, wings/pipeline/pipeline.py
# tests: wings/kernels/layers/fused_attention.py
"""Tests that rematerialized stacks of layers on a mesh compute the same with kernels."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.kernel_use import KernelUse
from lingvo_gshard.layers.stacks.execution import Sequential
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.sharding import annotate, annotate_like
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.repeat.loop import Repeat
from lingvo_gshard.wings.saved_programs.platforms import calls_of_libraries
from tests.kernels import programs

B, L, M, H, N, LAYERS = 4, 128, 32, 48, 2, 3


def make_stack(execution, policy, layers=LAYERS, dropout_rate=0.0):
    params = TransformerStack.params().set(
        model_dim=M, hidden_dim=H, num_heads=N, num_layers=layers, moe_every=0, is_causal=True
    )
    params.attention_dropout_rate = dropout_rate
    params.execution = execution.set(rematerialize=policy)
    return params.instantiate(path="stack")


def program(stack, mesh, strategy, platform):
    """Returns the program of the stack's output and all gradients."""
    specs = stack.variable_specs()

    def step(x, segments, *weights):
        sources = [x, *map(annotate_like, weights, specs.flatten())]
        with tf.GradientTape() as tape, context.scope(training=True, seed=tf.constant([1, 0])):
            tape.watch(sources)
            y = stack.fprop(specs.pack(sources[1:]), annotate(sources[0], "BLM"), segments)
            y = tf.where(segments[..., None] > 0, y, 0.0)
            # The output is normalized, so that the gradient of its square is 0.
            loss = tf.reduce_sum(y * np.cos(np.arange(B * L * M)).reshape(B, L, M))
        found = [y, *tape.gradient(loss, sources)]
        return [(str(i), value, None) for i, value in enumerate(found)]

    partitioning = Partitioning.make(mesh, strategy).on(platform)
    named = [("x", (B, L, M), "BLM", "float32"), ("segments", (B, L), "BL", "int32")]
    named += [(f"w{i}", tuple(s.shape), s.layout, "float32") for i, s in enumerate(specs.flatten())]
    return programs.lowered(step, named, partitioning)


class StacksTest(testing.TestCase, parameterized.TestCase):
    @pytest.mark.slow
    def test_what_a_loop_saves_of_a_layer_is_right(self):
        """A loop carries shards of manual regions, and full tensors computed from them."""
        self.check(Repeat, "products")

    @parameterized.parameters(
        (Repeat, "none"),
        (Repeat, "full"),
        (Sequential, "none"),
        (Sequential, "products"),
        (Sequential, "full"),
    )
    @pytest.mark.slow
    def test_what_other_policies_save_is_right(self, execution, policy):
        self.check(execution, policy)

    def test_stages_of_a_pipeline_use_kernels(self):
        stack = make_stack(Pipeline.params().set(stages=2, micro_batches=2), "none", layers=4)
        made = program(stack, "stage=2,data=2,model=2", "data_pipeline_tensor", "tpu")
        (use,) = made.kernels
        self.assertEqual((use.kernel, use.obstacle), ("attention", ""))
        calls = calls_of_libraries(made.exported().mlir_module())
        self.assertEqual(calls, ["tpu_custom_call"])

    @pytest.mark.slow
    def test_stages_compute_what_they_compute_without_kernels(self):
        """Each device computes its own stage, and a part of the rows and heads."""
        execution = Pipeline.params().set(stages=2, micro_batches=2)
        stack = make_stack(execution, "none", layers=4)
        self.compare(stack, "stage=2,data=2,model=2", "data_pipeline_tensor", 1)

    @parameterized.parameters(
        ("stage=2", "pipeline", "products", 2),
        ("stage=2,data=2", "data_pipeline", "full", 2),
        ("stage=2,data=2", "data_pipeline", "products", 2),
        # Each device has two stages, or all four.
        ("stage=2,data=2", "data_pipeline", "none", 4),
        ("data=2", "data", "none", 4),
        ("data=1", "replicated", "products", 2),
    )
    @pytest.mark.slow
    def test_what_stages_save_is_right(self, mesh, strategy, policy, stages):
        execution = Pipeline.params().set(stages=stages, micro_batches=4)
        stack = make_stack(execution, policy, layers=4)
        self.compare(stack, mesh, strategy, 1)

    @parameterized.parameters(
        (Pipeline.params().set(stages=2, micro_batches=2), "stage=2,data=2", "data_pipeline"),
        (Repeat.params(), "data=2,model=2", "fsdp_tensor"),
    )
    @pytest.mark.slow
    def test_every_layer_and_micro_batch_drops_weights_of_its_own(self, execution, mesh, strategy):
        """The backward pass draws the same again."""
        stack = make_stack(execution, "full", layers=4, dropout_rate=0.2)
        self.compare(stack, mesh, strategy, 1, "cuda_interpreted")

    def check(self, execution, policy):
        """Compares the gradients of a stack on a mesh with those without kernels."""
        stack = make_stack(execution.params(), policy)
        uses = 1 if execution is Repeat else LAYERS
        self.compare(stack, "data=2,model=2", "fsdp_tensor", uses)

    def compare(self, stack, mesh, strategy, uses, platform="tpu_interpreted"):
        """Compares the gradients on a mesh with those without kernels.

        Args:
          stack: the stack.
          mesh: the mesh.
          strategy: the strategy.
          uses: number of layers that say which kernel they use.
          platform: the platform of the kernels.
        """
        theta = stack.init(1)
        generator = np.random.default_rng(1)
        x = generator.normal(size=(B, L, M)).astype(np.float32)
        segments = np.sort(generator.integers(0, 3, (B, L)), 1)[:, ::-1].astype(np.int32)
        arrays = [x, segments, *map(np.asarray, theta.flatten())]
        fused = program(stack, mesh, strategy, platform)
        self.assertLen(fused.kernels, uses)
        self.assertEqual({(use.kernel, use.obstacle) for use in fused.kernels}, {("attention", "")})
        self.assertIsInstance(fused.kernels[0], KernelUse)
        plain = program(stack, mesh, strategy, "")
        (found, _), (expected, _) = programs.run(fused, arrays), programs.run(plain, arrays)
        for one, other in zip(found, expected, strict=True):
            self.assertAllClose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


if __name__ == "__main__":
    testing.main()
