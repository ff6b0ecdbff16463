# tests: wings/kernels/layers/fused_attention.py, wings/kernels/attention.py
"""Verifies attention layers with kernels: eight devices compute what one device computes."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import lingvo_gshard
from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.cross_attention import CrossAttention
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.testing import passes
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.verification.function import verify_function
from tests.layers.attention import attention_options as attentions
from tests.tools.tiny_quickstart import EXPERIMENT, SETTINGS

B, L, K, M = 4, 128, 136, 8
LAYERS = {
    "causal": attentions.plain(is_causal=True),
    "options": attentions.attention("biases", is_causal=True, window=40, logit_cap=2.0),
    "published": attentions.attention("published"),
    "latent": attentions.latent(),
    "cross": attentions.plain(CrossAttention),
}
DROPPED = {
    "dropped": attentions.plain(is_causal=True, dropout_rate=0.25),
    "dropped_options": attentions.attention("published", dropout_rate=0.25),
    "dropped_cross": attentions.plain(CrossAttention, dropout_rate=0.25),
}
# B of 4 does not divide over 8 devices; N of 2 or 4 does not divide over 4 or 8.
STRATEGIES = {
    "data": "data=8",
    "tensor": "model=8",
    "data_tensor": "data=2,model=4",
    "expert_fsdp_tensor": "data=2,fsdp=2,model=2",
}
USED = "the platform's kernel computes the attention of layer"


def make_inputs():
    """Returns rows of several segments, and memories with sources of all of them."""
    rng = np.random.default_rng(5)
    segments, source_segments = (
        np.sort(rng.integers(1, 4, (B, size)), 1).astype(np.int32) for size in (L, K)
    )
    segments[:, -9:] = 0
    rows = [rng.normal(size=(B, size, M)).astype(np.float32) for size in (L, K)]
    return NestedMap(x=rows[0], memory=rows[1], segments=segments, source_segments=source_segments)


def pass_of(name):
    """Returns a function of the weights and inputs of a layer: its output and all gradients."""
    layer = (LAYERS | DROPPED)[name].instantiate(path="layer")
    specs = layer.variable_specs()

    def run(theta, inputs):
        theta = annotate_weights(theta, specs)
        sources = NestedMap(theta=theta, x=annotate(inputs.x, "BLM"), memory=inputs.memory)
        with context.scope(training=True, seed=tf.constant([1, 0])), tf.GradientTape() as tape:
            tape.watch(sources.flatten())
            if "cross" in name:
                mask = layer.mask(inputs.segments, inputs.source_segments)
                output = layer.fprop(sources.theta, sources.x, sources.memory, mask)
            else:
                output = layer.fprop(sources.theta, sources.x, layer.mask(inputs.segments))
            # What padding attends to is not defined.
            output = tf.where(inputs.segments[..., None] > 0, output, 0.0)
            total = tf.reduce_sum(tf.sin(output))
        zero = tf.UnconnectedGradients.ZERO
        return output, tape.gradient(total, sources.flatten(), unconnected_gradients=zero)

    return run, passes.make_theta(layer).transform(np.asarray)


class PartitionedTest(testing.TestCase, parameterized.TestCase):
    def check(self, name, kernels, strategy):
        function, theta = pass_of(name)
        mesh = STRATEGIES[strategy]
        found = verify_function(
            function, [theta, make_inputs()], mesh=mesh, strategy=strategy, kernels=kernels
        )
        self.assertIn(USED, found.notes)
        self.assertTrue(found.is_equal, "\n".join(found.lines()))

    def test_a_layer_is_equal_over_data_and_model(self):
        self.check("causal", "cuda", "data_tensor")

    @parameterized.product(
        name=list(LAYERS), kernels=("tpu", "cuda"), strategy=("data_tensor", "expert_fsdp_tensor")
    )
    @pytest.mark.slow
    def test_every_layer_is_equal(self, name, kernels, strategy):
        self.check(name, kernels, strategy)

    @parameterized.product(name=list(DROPPED), strategy=("tensor", "expert_fsdp_tensor"))
    @pytest.mark.slow
    def test_every_device_drops_its_part_of_the_weights(self, name, strategy):
        self.check(name, "cuda", strategy)

    @parameterized.parameters("tpu", "cuda")
    @pytest.mark.slow
    def test_a_training_step_is_equal(self, kernels):
        """Rows of 256 shrink to 128, the least that kernels compute."""
        settings = [*SETTINGS, "input.source_length = 256", "input.target_length = 256"]
        params = apply_gin(lingvo_gshard.experiment(EXPERIMENT), [], settings)
        params.input.batch_rows = 8
        found = lingvo_gshard.verify(
            params, mesh="data=2,model=4", strategy="data_tensor", kernels=kernels
        )
        used = [note for note in found.notes if note.startswith("the platform's kernel")]
        self.assertLen(used, 1)
        self.assertIn("and 2 more", used[0])
        self.assertTrue(any("source_length = 128" in note for note in found.notes), found.notes)
        self.assertTrue(found.is_equal, "\n".join(found.lines()))

    def test_an_unknown_platform_is_refused(self):
        function, theta = pass_of("causal")
        with self.assertRaisesRegex(ValueError, "`kernels=cpu` is unknown"):
            verify_function(function, [theta, make_inputs()], mesh="data=2", kernels="cpu")

    @parameterized.product(kernels=("tpu", "cuda"), strategy=("data", "tensor"))
    @pytest.mark.slow
    def test_parts_that_do_not_divide_are_equal(self, kernels, strategy):
        self.check("options", kernels, strategy)


if __name__ == "__main__":
    testing.main()
