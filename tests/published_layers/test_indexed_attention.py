"""Tests the attention to keys that an indexer chooses against loops in float64."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.layers.attention.mask import MASKED
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import transformer
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.published_layers.indexed_attention import IndexedAttention
from tests.layers.attention import attention_options, attention_reference
from tests.layers.stacks.stepwise import run_stepwise

B, L, M, N, TOPK = 2, 9, 8, 2, 3
HEADS, DIM = 8, 4
SEGMENTS = np.array([[1] * 6 + [2] * 2 + [0], [1] * 9], np.int32)
X = np.random.default_rng(1).normal(size=(B, L, M)).astype(np.float32)


def params(**values):
    return attention_options.indexed(index_topk=TOPK).set(**values)


def make(p) -> tuple:
    layer = p.instantiate(path="attention")
    rng = np.random.default_rng(2)
    return layer, layer.init(1).transform(
        lambda w: w + (0.4 * rng.normal(size=w.shape)).astype("f4")
    )


def turned(p, vector, position):
    rotated = vector[None].copy()
    attention_reference.rotate(rotated, position, p.rotary_dim / DIM, p.rotary_base, p.index_pairs)
    return rotated[0]


def chosen_keys(p, theta, text) -> list[set[int]]:
    """Returns the keys of each token of a text [L,M], by arXiv 2512.02556, equation 1."""
    w = {name: np.asarray(value, np.float64) for name, value in theta.flatten_items()}
    chosen, keys = [], []
    for position, token in enumerate(text.astype(np.float64)):
        key = token @ w["w_index_key"]
        key = (key - key.mean()) / np.sqrt(key.var() + 1e-6)
        key = key * w["index_norm.scale"] + w["index_norm.bias"]
        keys.append(turned(p, key, position))
        low = token @ w["w_query_down"]
        low *= w["query_norm.scale"] / np.sqrt((low**2).mean() + 1e-6)
        score = np.zeros(position + 1)
        for head in range(HEADS):
            query = turned(p, low @ w["w_index_query"][:, head], position)
            share = token @ w["w_index_head"][:, head]
            score += share * np.maximum([query @ each for each in keys], 0)
        chosen.append(set(np.argsort(-score)[:TOPK]))
    return chosen


def masked(p, theta, text) -> np.ndarray:
    """Returns the output [L,M] of latent attention, one query after the other."""
    dense, _ = make(attention_options.latent(rotary_dim=p.rotary_dim))
    y = []
    for query, keys in enumerate(chosen_keys(p, theta, text)):
        bias = np.full((1, 1, len(text), len(text)), MASKED, np.float32)
        bias[0, 0, query, sorted(keys)] = 0
        mask = dense.mask(tf.ones([1, len(text)], tf.int32))
        mask = dataclasses.replace(mask, bias_B1LK=tf.constant(bias))
        y.append(dense.fprop(theta, tf.constant(text[None]), mask).numpy()[0, query])
    return np.array(y)


@pytest.mark.parametrize("pairs", ["halves", "neighbors"])
def test_a_token_attends_to_the_chosen_keys(pairs):
    p = params(index_pairs=pairs, rotary_dim=DIM)
    layer, theta = make(p)
    y = layer.fprop(theta, tf.constant(X), layer.mask(tf.constant(SEGMENTS))).numpy()
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        here = SEGMENTS[row] == segment
        assert_close(y[row, here], masked(p, theta, X[row, here]), "float32")


def test_short_rows_attend_to_all():
    layer, theta = make(params(index_topk=L))
    dense, _ = make(attention_options.latent())
    mask = layer.mask(tf.constant(SEGMENTS))
    expected = dense.fprop(theta, tf.constant(X), mask)
    assert_close(layer.fprop(theta, tf.constant(X), mask), expected, "float32")


def test_decoding_steps_choose_the_same():
    p = TransformerStack.params().set(num_layers=2, model_dim=M, hidden_dim=12, moe_every=0)
    p.layer.self_attention = params()
    stack, theta = make(p.set(is_causal=True, num_heads=N))
    expected = stack.fprop(theta, tf.constant(X), tf.ones([B, L], tf.int32))
    assert_close(run_stepwise(stack, theta, tf.constant(X), None), expected, "float32")
    assert transformer.stack_cache_shapes(stack, B, L)[0]["index"] == (B, 1, L, DIM)


def test_the_choice_has_no_gradient():
    layer, theta = make(params())
    frozen = {
        spec.path.rpartition(".")[2] for spec in layer.variable_specs().flatten() if spec.is_frozen
    }
    assert frozen == {"w_index_query", "w_index_key", "w_index_head"}
    with tf.GradientTape() as tape:
        tape.watch(theta.w_index_key)
        y = layer.fprop(theta, tf.constant(X), layer.mask(tf.constant(SEGMENTS)))
    assert tape.gradient(y, theta.w_index_key) is None


def test_what_it_cannot_do_is_refused():
    with pytest.raises(UserError, match="kernel: BlockwiseKernel cannot mask single keys"):
        make(params(kernel=BlockwiseKernel.params()))
    with pytest.raises(UserError, match="query_rank: 0; the indexer reads"):
        make(params(query_rank=0))


def test_counts_the_operations_of_the_indexer():
    layer, _ = make(params())
    dense, _ = make(attention_options.latent())
    shape = TokenShape(B, L)
    weights = 6 * HEADS * DIM + M * (DIM + HEADS)
    visible = L * (L + 1) // 2
    more = 2 * B * (L * weights + visible * HEADS * (DIM + 1))
    assert flops(layer, shape) == flops(dense, shape) + more
    assert isinstance(layer, IndexedAttention)
