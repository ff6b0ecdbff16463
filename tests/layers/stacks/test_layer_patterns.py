# tests: layers/stacks/transformer.py, layers/stacks/transformer_layer.py
# tests: wings/inference/layers/transformer.py
"""Compares norm positions and alternating attentions of stacks with sums of their parts."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.layers.stacks.transformer import TransformerStack, is_expert_layer
from lingvo_gshard.layers.stacks.transformer_layer import Memory, TransformerLayer
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from tests.layers.stacks.executions import loop
from tests.layers.stacks.stepwise import run_stepwise

B, L, K, M, N, H = 2, 7, 5, 8, 2, 12
NEAR = SelfAttention.params().set(window=2, rotary_fraction=1.0, rotary_base=50.0)
FAR = SelfAttention.params().set(rotary_fraction=1.0)


def stack(num_layers: int = 4, **values: object) -> TransformerStack:
    p = TransformerStack.params().set(num_layers=num_layers, model_dim=M, num_heads=N, hidden_dim=H)
    p.layer.norm = RMSNorm.params()
    p.set(attention_pattern=(NEAR, FAR), is_causal=True, moe_every=0)
    for name, value in values.items():
        p.set_path(name.replace("__", "."), value)
    return p.instantiate(path="decoder")


def weights(layer) -> NestedMap:
    rng = np.random.default_rng(2)
    return layer.init(1).transform(lambda w: w + (0.3 * rng.normal(size=w.shape)).astype("f4"))


def rows(length: int = L, seed: int = 1) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(size=(B, length, M)), tf.float32)


SEGMENTS = tf.ones([B, L], tf.int32)


class LayerPatternsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters("before", "both", "output", "sum")
    def test_norms_are_where_they_should_be(self, position):
        p = TransformerLayer.params().set(model_dim=M, norm_position=position)
        p.self_attention.num_heads, p.feed_forward.hidden_dim = N, H
        layer = p.instantiate(path="layer")
        theta, x = weights(layer), rows()
        mask = layer.self_attention.mask(SEGMENTS)
        actual = layer.fprop(theta, x, [mask])

        def part(name, *arguments):
            return layer.children[name].fprop(theta[name], *arguments)

        for name, more in (("self_attention", mask), ("feed_forward", SEGMENTS)):
            has_first, has_output = position in ("before", "both"), position in ("both", "output")
            self.assertEqual(f"{name}_norm" in theta, position != "output")
            self.assertEqual(f"{name}_output_norm" in theta, has_output)
            h = part(name, part(f"{name}_norm", x) if has_first else x, more)
            x += part(f"{name}_output_norm", h) if has_output else h
            x = part(f"{name}_norm", x) if position == "sum" else x
        assert_close(actual, x, "order")

    def test_attentions_alternate(self):
        layers = stack()
        theta, x = weights(layers), rows()
        actual = layers.fprop(theta, x, SEGMENTS)
        windows = [layer.self_attention.p.window for layer in layers.layers_in_order()]
        self.assertEqual(windows, [2, 0, 2, 0])
        for layer, layer_theta, window in zip(layers.layers, theta.layers, windows, strict=True):
            mask = AttentionMask(SEGMENTS, is_causal=True, window=window)
            x = layer.fprop(layer_theta, x, [mask])
        assert_close(actual, layers.final_norm.fprop(theta.final_norm, x), "order")

    @parameterized.named_parameters(
        ("decoder_only", {"layer__norm_position": "both"}),
        ("decoder", {"layer__norm_position": "sum", "has_final_norm": False, "is_decoder": True}),
    )
    def test_decoding_steps_equal_the_stack(self, values):
        layers = stack(**values)
        theta, x = weights(layers), rows()
        memory = None
        if layers.p.is_decoder:
            memory = Memory(rows(K, 2), tf.constant([[1] * K, [1, 1, 0, 0, 0]]))
        self.assertEqual("final_norm" in theta, layers.p.has_final_norm)
        expected = layers.fprop(theta, x, tf.ones([B, L], tf.int32), memory)
        assert_close(run_stepwise(layers, theta, x, memory), expected, "order")

    @parameterized.parameters(
        (2, 0, 0, [1, 3, 5]),
        (3, 1, 0, [1, 4]),
        (3, 0, 1, [3]),
        (0, 1, 0, []),
        (1, 0, 2, [2, 3, 4, 5]),
    )
    def test_experts_are_in_the_layers_of_a_period(self, every, offset, first, expected):
        p = TransformerStack.params().set(moe_every=every, moe_offset=offset, dense_first=first)
        self.assertEqual([index for index in range(6) if is_expert_layer(p, index)], expected)

    def test_a_loop_after_first_layers_equals_separate_layers(self):
        values = {"num_layers": 5, "layer__norm_position": "both"}
        looped = stack(**values, sequential_first=1, execution=loop())
        theta, x = weights(looped), rows()
        separate = stack(**values)
        flat = NestedMap(layers=[weights for _, weights in looped.unrolled(theta)])
        flat.update(
            final_norm=theta.final_norm,
            token_dropout=theta.token_dropout,
            input_dropout=theta.input_dropout,
        )
        windows = [layer.self_attention.p.window for layer in looped.layers_in_order()]
        self.assertEqual(windows, [2, 0, 2, 0, 2])
        expected = separate.fprop(flat, x, SEGMENTS)

        @tf.function(autograph=False)
        def compiled(x):
            return looped.fprop(theta, x, SEGMENTS)

        assert_close(compiled(x), expected, "order")

    @parameterized.parameters(
        ({"attention_pattern": (NEAR, 3)}, r"attention_pattern\[1\]: 3 is not Params"),
        (
            {"attention_pattern": (NEAR, FAR.copy().set(kernel=BlockwiseKernel.params()))},
            r"attention_pattern\[1\].kernel: BlockwiseKernel",
        ),
        ({"sequential_first": 9}, "sequential_first: 9 is not in 0 to decoder.num_layers, 4"),
        ({"num_layers": 5, "execution": loop()}, "a multiple of 2 layers .*attention_pattern"),
    )
    def test_rejects_invalid_options(self, values, message):
        with self.assertRaisesRegex(ValueError, f"decoder.*{message}"):
            stack(**values)


if __name__ == "__main__":
    testing.main()
