# tests: layers/stacks/transformer.py, layers/stacks/transformer_layer.py
"""Tests a norm that sublayers share, the scale of residuals, and norms of embeddings."""

import numpy as np
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.embedding import LearnedPositions
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import TransformerLayer
from lingvo_gshard.testing.layers import assert_close

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
SEGMENTS = tf.ones((2, 5), tf.int32)


def make(**values):
    """Returns a layer with random weights, and the weights."""
    p = TransformerLayer.params().set(model_dim=8, **values)
    p.self_attention.set(num_heads=2, is_causal=True)
    p.feed_forward.hidden_dim = 12
    layer = p.instantiate(path="layer")
    rng = np.random.default_rng(1)
    theta = layer.init(1).transform(lambda w: tf.constant(rng.normal(size=w.shape), tf.float32))
    return layer, theta


def run(layer, theta):
    with context.scope(training=False):
        return layer.fprop(theta, tf.constant(X), [layer.self_attention.mask(SEGMENTS)])


class NormPositionsTest(testing.TestCase):
    def test_sublayers_with_a_shared_norm_stand_side_by_side(self):
        layer, theta = make(norm_position="shared", residual_scale=0.5)
        self.assertNotIn("feed_forward_norm", theta)
        with context.scope(training=False):
            h = layer.self_attention_norm.fprop(theta.self_attention_norm, tf.constant(X))
            mask = layer.self_attention.mask(SEGMENTS)
            attended = layer.self_attention.fprop(theta.self_attention, h, mask)
            fed = layer.feed_forward.fprop(theta.feed_forward, h, SEGMENTS)
        assert_close(run(layer, theta), X + 0.5 * (attended + fed).numpy(), "float32")

    def test_a_shared_norm_is_no_norm_of_a_decoder_with_a_memory(self):
        with self.assertRaisesRegex(ValueError, "norm_position: 'shared' with layer.has_cross"):
            make(norm_position="shared", has_cross_attention=True)

    def test_the_input_of_a_stack_may_be_normalized(self):
        p = TransformerStack.params().set(
            num_layers=1, model_dim=8, num_heads=2, hidden_dim=12, moe_every=0
        )
        plain, stack = p.instantiate(), p.copy().set(has_input_norm=True).instantiate()
        theta = stack.init(2)
        with context.scope(training=False):
            h = stack.input_norm.fprop(theta.input_norm, tf.constant(X))
            found = stack.fprop(theta, tf.constant(X), SEGMENTS)
            expected = plain.fprop(theta, h, SEGMENTS)
        assert_close(found, expected, "float32")

    def test_learned_positions_may_begin_after_the_first_rows(self):
        p = LearnedPositions.params().set(model_dim=4, max_length=3, first_position=2)
        layer = p.instantiate(path="positions")
        theta = layer.init(1)
        self.assertEqual(theta.table.shape, (5, 4))
        found = layer.fprop(theta, tf.constant([[0, 2]]))
        self.assertAllEqual(found[0], tf.gather(theta.table, [2, 4]))


if __name__ == "__main__":
    testing.main()
