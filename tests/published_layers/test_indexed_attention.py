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
from lingvo_gshard.wings.published_layers.indexed_attention import IndexedAttention, IndexedStack
from tests.layers.attention import attention_options, attention_reference
from tests.layers.stacks.executions import loop, pipeline, sequential
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


def masked(p, theta, text, chosen=None) -> np.ndarray:
    """Returns the output [L,M] of latent attention, one query after the other."""
    dense, _ = make(attention_options.latent(rotary_dim=p.rotary_dim))
    y = []
    for query, keys in enumerate(chosen or chosen_keys(p, theta, text)):
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


def shared(*choosers, **values):
    """Returns the Params of a stack whose layers take the choices of these layers."""
    p = IndexedStack.params().set(num_layers=len(choosers), choosers=choosers, num_heads=N)
    p.set(model_dim=M, hidden_dim=12, moe_every=0, is_causal=True, **values)
    p.layer.self_attention = params()
    return p


def test_a_layer_takes_the_choice_of_an_earlier_one():
    stack, theta = make(shared(0, 0))
    (first, w0), (second, w1) = stack.unrolled(theta)
    assert not any("index" in name for name in w1.self_attention)
    ones = tf.ones([B, L], tf.int32)
    entered = first.enter("self_attention", w0, tf.constant(X)).numpy()
    chosen = [chosen_keys(params(), w0.self_attention, text) for text in entered]
    h = first.fprop(w0, tf.constant(X), [first.self_attention.mask(ones)])
    entered = second.enter("self_attention", w1, h).numpy()
    own = params(has_indexer=False)
    rows = [masked(own, w1.self_attention, *each) for each in zip(entered, chosen, strict=True)]
    h = second.add("self_attention", w1, h, tf.constant(np.array(rows), tf.float32))
    last = second.feed_forward.fprop(w1.feed_forward, second.enter("feed_forward", w1, h), ones)
    expected = stack.finish(theta, second.add("feed_forward", w1, h, last))
    assert_close(stack.fprop(theta, tf.constant(X), ones), expected, "float32")


def test_shared_choices_do_not_depend_on_how_the_layers_are_run():
    found = []
    for execution in (loop(), loop("full"), sequential(), sequential("full")):
        p = shared(0, 1, 1, 3, 3, 5, 5, execution=execution, sequential_first=3)
        p.attention_pattern = (p.layer.self_attention,) * 2
        stack = p.instantiate(path="stack")
        theta = stack.init(1)

        @tf.function
        def run(x, stack=stack, theta=theta):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = stack.fprop(theta, x, tf.ones([B, L], tf.int32))
                loss = tf.reduce_sum(y**2 * tf.range(float(M)))
            return y, tape.gradient(loss, x)

        found.append(run(tf.constant(X)))
    for y, gradient in found[1:]:
        assert_close(y, found[0][0], "float32")
        assert_close(gradient, found[0][1], "float32")


def test_decoding_steps_share_choices():
    stack, theta = make(shared(0, 1, 1, 1))
    expected = stack.fprop(theta, tf.constant(X), tf.ones([B, L], tf.int32))
    assert_close(run_stepwise(stack, theta, tf.constant(X), None), expected, "float32")
    shapes = transformer.stack_cache_shapes(stack, B, L)
    assert ["index" in each for each in shapes] == [True, True, False, False]
    dense, _ = make(attention_options.latent())
    taking = stack.layers_in_order()[2].self_attention
    assert flops(taking, TokenShape(B, L)) == flops(dense, TokenShape(B, L))


def test_choices_that_cannot_be_shared_are_refused():
    with pytest.raises(UserError, match="stack.execution: Pipeline with interleaved=1 after 0"):
        shared(0, 0, execution=pipeline(2)).instantiate(path="stack")
    with pytest.raises(UserError, match="execution: Repeat .* after 1 layers; .*that chooses"):
        shared(0, 0, 2, execution=loop(), sequential_first=1).instantiate(path="stack")
    with pytest.raises(UserError, match="execution: Repeat with interleaved=2 "):
        shared(0, 0, execution=loop().set(interleaved=2)).instantiate(path="stack")
    layer, theta = make(params(has_indexer=False))
    with pytest.raises(UserError, match="attention.has_indexer: False; True was expected"):
        layer.fprop(theta, tf.constant(X), layer.mask(tf.constant(SEGMENTS)))


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
