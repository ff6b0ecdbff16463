# tests: layers/stacks/transformer.py, layers/attention/relative_bias.py
"""Compares a relative bias that all layers share with layers that have their own tables."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import Memory
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from tests.layers.attention.attention_options import latent
from tests.layers.stacks.executions import loop, pipeline
from tests.layers.stacks.stepwise import run_stepwise

B, L, K, M, N, LAYERS = 2, 9, 5, 8, 2, 2
SHARED = {"shared_relative_bias__buckets": 4, "shared_relative_bias__max_distance": 6}
OWN = {
    "layer__self_attention__relative_buckets": 4,
    "layer__self_attention__relative_max_distance": 6,
}
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0], [1] * 9], np.int32)


def stack(**values: object) -> TransformerStack:
    p = TransformerStack.params().set(num_layers=LAYERS, model_dim=M, num_heads=N, hidden_dim=12)
    p.moe_every = 0
    for name, value in values.items():
        p.set_path(name.replace("__", "."), value)
    return p.instantiate(path="encoder")


def weights(layers) -> NestedMap:
    rng = np.random.default_rng(2)
    return layers.init(1).transform(lambda w: w + (0.3 * rng.normal(size=w.shape)).astype("f4"))


def rows(length: int = L, seed: int = 1) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(size=(B, length, M)), tf.float32)


def run(layers, theta, tables) -> list[tf.Tensor]:
    """Returns the output, and the sum of its gradients to the tables."""
    with tf.GradientTape() as tape:
        tape.watch(tables)
        y = layers.fprop(theta, rows(), tf.constant(SEGMENTS))
        weighted = y[SEGMENTS > 0] * np.random.default_rng(3).normal(size=(17, M))
        total = tf.reduce_sum(weighted)
    return [y[SEGMENTS > 0], tf.add_n(tape.gradient(total, tables))]


class SharedRelativeBiasTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_equals_layers_with_equal_tables(self, is_causal):
        shared, own = stack(is_causal=is_causal, **SHARED), stack(is_causal=is_causal, **OWN)
        theta = weights(shared)
        table = theta.shared_relative_bias.table
        self.assertEqual(table.shape, (4, N))
        tables = [tf.identity(table) for _ in range(LAYERS)]
        layers = []
        for layer, its_table in zip(theta.layers, tables, strict=True):
            attention = NestedMap(layer.self_attention, relative_bias=its_table)
            layers.append(NestedMap(layer, self_attention=attention))
        own_theta = own.variable_specs().pack(
            [
                dict(NestedMap(theta, layers=layers).flatten_items())[path]
                for path, _ in own.variable_specs().flatten_items()
            ]
        )
        tables = [layer.self_attention.relative_bias for layer in own_theta.layers]
        for one, other in zip(
            run(shared, theta, [table]), run(own, own_theta, tables), strict=True
        ):
            assert_close(one, other, "order")

    def test_a_loop_sums_the_gradients_of_its_layers(self):
        separate, looped = stack(**SHARED), stack(**SHARED, execution=loop("full"))
        theta = weights(looped)
        flat = NestedMap(theta, layers=[weights for _, weights in looped.unrolled(theta)])
        table = theta.shared_relative_bias.table

        @tf.function(autograph=False)
        def compiled():
            return run(looped, theta, [table])

        for one, other in zip(compiled(), run(separate, flat, [table]), strict=True):
            assert_close(one, other, "order")

    def test_decoding_steps_equal_the_stack(self):
        layers = stack(**SHARED, is_decoder=True)
        theta, x = weights(layers), rows()
        memory = Memory(rows(K, 2), tf.constant([[1] * K, [1, 1, 0, 0, 0]]))
        expected = layers.fprop(theta, x, tf.ones([B, L], tf.int32), memory)
        assert_close(run_stepwise(layers, theta, x, memory), expected, "order")

    @parameterized.parameters(
        (OWN, "buckets: 4 is not possible with SelfAttention, which has none or its own"),
        ({"layer__self_attention": latent()}, "not possible with LatentAttention"),
        ({"layer__self_attention__kernel": BlockwiseKernel.params()}, "with BlockwiseKernel"),
        (
            {"execution": pipeline(2)},
            "with Pipeline, which splits batches; choose Sequential or Repeat",
        ),
        ({"shared_relative_bias__buckets": 3}, "buckets: 3; an even number"),
        ({"shared_relative_bias__max_distance": 1}, "max_distance: 1; more than 1"),
    )
    def test_rejects_what_cannot_share(self, values, message):
        with self.assertRaisesRegex(ValueError, f"encoder.shared_relative_bias.*{message}"):
            stack(**{**SHARED, **values})


if __name__ == "__main__":
    testing.main()
