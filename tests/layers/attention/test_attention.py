"""Multi-head attention against loops over sentences, heads and positions."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.layers.attention.attention import MultiHeadAttention
from lingvo_gshard.layers.attention.mask import segment_bias
from tests.tolerances import assert_close

B, L, K, M, N = 2, 5, 6, 8, 2
QUERY_SEGMENTS = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 2, 2]], np.int32)
MEMORY_SEGMENTS = np.array([[1, 1, 2, 0, 0, 0], [1, 2, 2, 2, 2, 2]], np.int32)


def make(**values) -> tuple[MultiHeadAttention, dict]:
    params = MultiHeadAttention.params().set(model_dim=M, num_heads=N, **values)
    layer = params.instantiate(path="attention")
    return layer, layer.init(1)


def activations(length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, length, M)).astype(np.float32)


def reference(theta, x, memory, sees) -> np.ndarray:
    """softmax(q k / sqrt(D)) v, head by head, over the keys k for which sees(b, q, k)."""
    w_query, w_key, w_value, w_out = (
        theta[name].numpy().astype(np.float64) for name in ("w_query", "w_key", "w_value", "w_out")
    )
    heads, head_dim = w_query.shape[1:]
    y = np.zeros(x.shape)
    for b in range(x.shape[0]):
        for q in range(x.shape[1]):
            seen = [k for k in range(memory.shape[1]) if sees(b, q, k)]
            for n in range(heads):
                query = x[b, q] @ w_query[:, n]
                scores = memory[b, seen] @ w_key[:, n] @ query / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                mixed = weights / weights.sum() @ (memory[b, seen] @ w_value[:, n])
                y[b, q] += mixed @ w_out[n]
    return y


@pytest.mark.parametrize("head_dim", [0, 3])
def test_cross_attention_is_the_formula(head_dim):
    layer, theta = make(head_dim=head_dim)
    assert theta.w_query.shape[2] == (head_dim or M // N)
    x, memory = activations(L), activations(K, seed=2)
    bias = segment_bias(tf.constant(QUERY_SEGMENTS), tf.constant(MEMORY_SEGMENTS))
    actual = layer.fprop(theta, tf.constant(x), tf.constant(memory), bias).numpy()

    def sees(b, q, k):
        return QUERY_SEGMENTS[b, q] == MEMORY_SEGMENTS[b, k]

    real = QUERY_SEGMENTS > 0
    assert_close(actual[real], reference(theta, x, memory, sees)[real], "float32")


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_is_the_formula(causal):
    layer, theta = make()
    x = activations(L)
    segments = tf.constant(QUERY_SEGMENTS)
    bias = segment_bias(segments, segments, causal)
    actual = layer.fprop(theta, tf.constant(x), tf.constant(x), bias).numpy()

    def sees(b, q, k):
        return QUERY_SEGMENTS[b, q] == QUERY_SEGMENTS[b, k] and (k <= q or not causal)

    real = QUERY_SEGMENTS > 0
    assert_close(actual[real], reference(theta, x, x, sees)[real], "float32")


@pytest.mark.parametrize("causal", [False, True])
def test_segment_bias_is_zero_where_a_query_may_look(causal):
    segments = tf.constant(QUERY_SEGMENTS)
    bias = segment_bias(segments, segments, causal).numpy()
    assert bias.shape == (B, 1, L, L) and bias.dtype == np.float32
    for b in range(B):
        for q in range(L):
            for k in range(L):
                same = QUERY_SEGMENTS[b, q] == QUERY_SEGMENTS[b, k] != 0
                sees = same and (k <= q or not causal)
                assert (bias[b, 0, q, k] == 0) == sees
                assert sees or bias[b, 0, q, k] < -1e8


def test_queries_that_see_nothing_stay_finite():
    layer, theta = make()
    x = tf.constant(activations(L))
    padding = tf.zeros([B, L], tf.int32)
    y = layer.fprop(theta, x, x, segment_bias(padding, padding))
    assert np.isfinite(y).all()


def test_step_by_step_is_causal_attention():
    layer, theta = make()
    x = tf.constant(activations(L))
    one_segment = tf.ones([B, L], tf.int32)
    expected = layer.fprop(theta, x, x, segment_bias(one_segment, one_segment, causal=True))
    cache = layer.init_cache(B, L + 2, tf.float32)
    for step in range(L):
        y, cache = layer.extend_step(theta, x[:, step : step + 1], tf.constant(step), cache)
        assert_close(y[:, 0], expected[:, step], "order")


def test_bfloat16_activations_keep_their_type_and_the_softmax_its_precision():
    layer, theta = make()
    x = activations(L)
    bias = segment_bias(tf.ones([B, L], tf.int32), tf.ones([B, L], tf.int32))
    exact = layer.fprop(theta, tf.constant(x), tf.constant(x), bias)
    rounded = tf.cast(x, tf.bfloat16)
    y = layer.fprop(theta, rounded, rounded, bias)
    assert y.dtype == tf.bfloat16
    assert_close(tf.cast(y, tf.float32), exact, "bfloat16")


def test_dropout_drops_weights_in_training_only():
    layer, theta = make(dropout_rate=0.5)
    x = tf.constant(activations(L))
    bias = segment_bias(tf.ones([B, L], tf.int32), tf.ones([B, L], tf.int32))
    plain = layer.fprop(theta, x, x, bias)
    with context.scope(training=True, seed=tf.constant([1, 2])):
        dropped = layer.fprop(theta, x, x, bias)
    assert not np.allclose(plain, dropped)


@pytest.mark.parametrize("values", [{"num_heads": 3}, {"num_heads": 0}])
def test_heads_that_do_not_divide_are_refused(values):
    with pytest.raises(ValueError, match="attention.num_heads: .* do not divide model_dim 8"):
        MultiHeadAttention.params().set(model_dim=M, **values).instantiate(path="attention")
