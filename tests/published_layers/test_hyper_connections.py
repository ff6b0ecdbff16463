"""Tests residual streams against a formula in float64."""

import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.published_layers.hyper_connections import StreamMixer, StreamReader
from tests.published_layers.streams import small_stack

B, L, M, S = 2, 3, 4, 3
X = np.random.default_rng(1).normal(size=(B, L, S * M)).astype(np.float32)
H = np.random.default_rng(2).normal(size=(B, L, M)).astype(np.float32)


def make(p) -> tuple:
    layer = p.instantiate(path="mixer")
    rng = np.random.default_rng(3)
    return layer, layer.init(1).transform(
        lambda w: w + (0.4 * rng.normal(size=w.shape)).astype("f4")
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def logits_of(theta, streams):
    """Returns the products [c] of normalized streams [S,M] of a token, without scale and bias."""
    flat = streams.reshape(-1).astype(np.float64)
    flat /= np.sqrt((flat**2).mean() + 1e-6)
    return flat @ np.asarray(theta.w, np.float64)


def test_a_reader_sums_the_streams():
    layer, theta = make(StreamReader.params().set(model_dim=M, streams=S))
    y = layer.fprop(theta, tf.constant(X)).numpy()
    for row, position in np.ndindex(B, L):
        streams = X[row, position].reshape(S, M)
        weights = sigmoid(logits_of(theta, streams) * theta.scale[0] + theta.bias) + 1e-6
        assert_close(y[row, position], weights @ streams, "float32")


def test_a_mixer_reads_and_writes_as_the_formula_says():
    layer, theta = make(StreamMixer.params().set(model_dim=M, streams=S, iterations=4))
    read, written = layer.fprop(theta, tf.constant(X)), layer.write(theta, tf.constant(X), H)
    scale, bias = (np.asarray(x, np.float64) for x in (theta.scale, theta.bias))
    for row, position in np.ndindex(B, L):
        streams = X[row, position].reshape(S, M)
        pre, post, matrix = np.split(logits_of(theta, streams), [S, 2 * S])
        pre = sigmoid(pre * scale[0] + bias[:S]) + 1e-6
        post = 2 * sigmoid(post * scale[1] + bias[S : 2 * S])
        matrix = np.exp((matrix * scale[2] + bias[2 * S :]).reshape(S, S))
        matrix = matrix / matrix.sum(1, keepdims=True) + 1e-6
        matrix /= matrix.sum(0, keepdims=True) + 1e-6
        for _ in range(3):
            matrix /= matrix.sum(1, keepdims=True) + 1e-6
            matrix /= matrix.sum(0, keepdims=True) + 1e-6
        assert_close(read[row, position], pre @ streams, "float32")
        expected = matrix.T @ streams + post[:, None] * H[row, position]
        assert_close(tf.reshape(written[row, position], [S, M]), expected, "float32")


def test_rows_and_columns_of_the_mixture_sum_to_one():
    layer, theta = make(StreamMixer.params().set(model_dim=M, streams=S))
    matrix = layer.matrix(theta, tf.constant(X)).numpy()
    for axis in (0, 1):
        np.testing.assert_allclose(matrix.sum(axis), 1.0, atol=1e-3)


def test_counts_the_products_with_the_streams():
    reader, _ = make(StreamReader.params().set(model_dim=M, streams=S))
    mixer, _ = make(StreamMixer.params().set(model_dim=M, streams=S))
    assert flops(reader, TokenShape(B, L)) == 2 * B * L * S * M * S
    assert flops(mixer, TokenShape(B, L)) == 2 * B * L * S * M * (S * (S + 2) + S)


def test_first_layers_have_their_own_parts():
    stack = small_stack(model_dim=8, has_token_ids=True).instantiate(path="stack")
    layers = stack.layers_in_order()
    assert [layer.self_attention.p.compressed for layer in layers] == [0, 2, 2, 2]
    assert [layer.self_attention.p.index_heads for layer in layers] == [0, 0, 8, 0]
    routers = [type(layer.feed_forward.router).__name__ for layer in layers]
    assert routers == ["LookupRouter", *["SoftplusRouter"] * 3]


def test_other_places_of_norms_are_refused():
    p = small_stack(model_dim=8, has_token_ids=True)
    p.layer.norm_position = "output"
    with pytest.raises(UserError, match="norm_position: 'output'; 'before' was expected"):
        p.instantiate(path="stack")


def test_counts_a_stack():
    stack = small_stack(model_dim=8, has_token_ids=True).instantiate(path="stack")
    layers, shape, tokens = stack.layers_in_order(), TokenShape(2, 6), 2 * 6
    attentions = sum(flops(layer.self_attention, shape) for layer in layers)
    mixer = 2 * 8 * (2 * 4 + 2)
    # Two of four experts, and a shared one, have two products of 8 x 8 numbers each.
    per_token = 4 * (2 * mixer + 8 * 4 + (2 + 1) * 2 * 8 * 8) + 2 * 8 * 2
    assert flops(stack, shape) == attentions + 2 * tokens * per_token
    specs = stack.variable_specs().flatten()
    unused = 4 * (4 - 2) * 2 * 8 * 8
    assert active_parameters(stack) == sum(math.prod(spec.shape) for spec in specs) - unused
