"""Token dropout: a stack computes what it would if some tokens of its input were zero."""

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.stacks.transformer import TransformerStack

B, L, M, RATE = 4, 16, 8, 0.3


def stack(**values):
    p = TransformerStack.params().set(num_layers=1, num_heads=2, hidden_dim=16, moe_every=0)
    return p.set(model_dim=M, is_causal=True, **values).instantiate(path="stack")


def test_a_stack_computes_what_it_would_with_zeros_for_dropped_tokens():
    dropping, plain = stack(token_dropout_rate=RATE), stack()
    theta = plain.init(1)
    x_BLM = tf.constant(np.random.default_rng(1).normal(size=(B, L, M)).astype(np.float32))
    segments_BL = tf.ones([B, L], tf.int32)
    dropout = Dropout.params().set(rate=RATE, whole_vectors=True)
    with context.scope(training=True, seed=tf.constant([5, 0])):
        found = dropping.fprop(theta, x_BLM, segments_BL)
        kept_BLM = dropout.instantiate(path="stack.token_dropout").fprop(theta, x_BLM)
    dropped = (kept_BLM.numpy() == 0).all(-1)
    assert 0 < dropped.sum() < dropped.size
    np.testing.assert_allclose(kept_BLM[~dropped], x_BLM[~dropped] / (1 - RATE), rtol=1e-6)
    expected = plain.fprop(theta, kept_BLM, segments_BL)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found - plain.fprop(theta, x_BLM, segments_BL)).max() > 0.1
    with context.scope(training=False):
        evaluated = dropping.fprop(theta, x_BLM, segments_BL)
    np.testing.assert_array_equal(evaluated, plain.fprop(theta, x_BLM, segments_BL))
