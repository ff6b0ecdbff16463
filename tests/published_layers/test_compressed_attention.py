# tests: wings/published_layers/compressed_attention.py, wings/published_layers/windows.py
# tests: wings/published_layers/key_blocks.py
"""Tests attention to compressed windows against loops in float64, packed and token by token."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.layers import MASKED, AttentionMask
from lingvo_gshard.layers.attention.kernel import SoftmaxOptions
from lingvo_gshard.layers.dropout import DropoutMask
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import transformer
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.published_layers import key_blocks
from lingvo_gshard.wings.published_layers.hyper_connections import HyperStack
from lingvo_gshard.wings.published_layers.key_blocks import KeyBlocks
from tests.layers.attention import attention_options, attention_reference
from tests.layers.stacks.stepwise import run_stepwise

B, L, M, N = 2, 13, 8, 2
SEGMENTS = np.array([[1] * 8 + [2] * 4 + [0], [1] * 13], np.int32)
X = np.random.default_rng(1).normal(size=(B, L, M)).astype(np.float32)
NEAR = {"compressed": 0, "index_heads": 0}
HEAVY = {"compressed": 3, "overlaps": False, "index_heads": 0}
SPARSE = {}
KINDS = {"near": NEAR, "heavy": HEAVY, "sparse": SPARSE}


def make(p) -> tuple:
    layer = p.instantiate(path="attention")
    rng = np.random.default_rng(2)
    return layer, layer.init(1).transform(
        lambda w: w + (0.4 * rng.normal(size=w.shape)).astype("f4")
    )


def normalized(x, scale=1.0):
    return x / np.sqrt((x**2).mean() + 1e-6) * scale


def turned(p, vector, position):
    """Returns a vector whose last part is rotated."""
    rotated = vector[None].copy()
    part = rotated[:, -p.rotary_dim :].copy()
    attention_reference.rotate(part, position, 1.0, p.rotary_base, p.rotary_pairs)
    rotated[:, -p.rotary_dim :] = part
    return rotated[0]


def softmax(logits, axis=0):
    exponentials = np.exp(logits - logits.max(axis, keepdims=True))
    return exponentials / exponentials.sum(axis, keepdims=True)


def window_keys(p, w, text) -> list[np.ndarray]:
    """Returns the key of each complete window (DeepSeek-V4, equations 9 to 12 and 20 to 23)."""
    keys, size = [], p.compressed
    for start in range(0, len(text) - size + 1, size):
        values, logits = [], []
        for series in range(1 + p.overlaps):
            first = start - size if p.overlaps and series == 0 else start
            for place in range(size if first >= 0 else 0):
                token = text[first + place]
                values.append(token @ w["w_value"][:, series])
                logits.append(token @ w["w_weight"][:, series] + w["b_place"][place, series])
        key = (softmax(np.array(logits)) * np.array(values)).sum(0)
        keys.append(turned(p, normalized(key, w["norm.scale"]), start))
    return keys


def reference(p, theta, text) -> np.ndarray:
    """Returns the output [L,M] of a text, one query and head after the other."""
    w = {name: np.asarray(value, np.float64) for name, value in theta.flatten_items()}

    def part(name):
        return {n.removeprefix(f"{name}."): x for n, x in w.items() if n.startswith(f"{name}.")}

    text = text.astype(np.float64)
    keys = [
        turned(p, normalized(token @ w["w_key"], w["key_norm.scale"]), position)
        for position, token in enumerate(text)
    ]
    windows = window_keys(p, part("compressor"), text) if p.compressed else []
    indexed = window_keys(p, part("index_compressor"), text) if p.index_heads else []
    y = []
    for position, token in enumerate(text):
        low = normalized(token @ w["w_query_down"], w["query_down_norm.scale"])
        seen = [i for i in range(len(windows)) if (i + 1) * p.compressed <= position + 1]
        if p.index_heads and len(windows) > p.index_topk:
            score = np.zeros(len(windows))
            for head in range(p.index_heads):
                query = turned(p, low @ w["w_index_query"][:, head], position)
                share = token @ w["w_index_head"][:, head]
                score += share * np.maximum([query @ each for each in indexed], 0)
            seen = sorted(seen, key=lambda i: -score[i])[: p.index_topk]
        attended = np.array(
            [*keys[max(position - p.window, 0) : position + 1], *(windows[i] for i in seen)]
        )
        outputs = []
        for head in range(N):
            query = turned(p, normalized(low @ w["w_query"][:, head]), position)
            logits = [*attended @ query / np.sqrt(p.head_dim), w["sinks"][head]]
            outputs.append(turned(p, softmax(np.array(logits))[:-1] @ attended, -position))
        groups = np.split(np.concatenate(outputs), p.output_groups)
        low = [group @ w["w_out_down"][index] for index, group in enumerate(groups)]
        y.append(np.concatenate(low) @ w["w_out"].reshape(-1, M))
    return np.array(y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_texts_of_packed_rows_equal_the_formula(kind, groups):
    p = attention_options.compressed(output_groups=groups, **KINDS[kind])
    layer, theta = make(p)
    y = layer.fprop(theta, tf.constant(X), layer.mask(tf.constant(SEGMENTS))).numpy()
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        here = SEGMENTS[row] == segment
        assert_close(y[row, here], reference(p, theta, X[row, here]), "float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [12, 16])
def test_texts_that_lie_across_blocks_equal_the_formula(kind, length):
    # Blocks of 4 positions: the window is 3.
    p = attention_options.compressed(**KINDS[kind])
    layer, theta = make(p)
    segments = np.array([[1] * 5 + [2] * (length - 6) + [0], [1] * length], np.int32)
    x = np.random.default_rng(3).normal(size=(B, length, M)).astype(np.float32)
    y = layer.fprop(theta, tf.constant(x), layer.mask(tf.constant(segments))).numpy()
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        here = segments[row] == segment
        assert_close(y[row, here], reference(p, theta, x[row, here]), "float32")


@pytest.mark.parametrize("length", [13, 16])
def test_near_keys_need_two_blocks_of_logits_for_a_query(length):
    keys = tf.zeros([B, length, 6])
    mask = AttentionMask(tf.ones([B, length], tf.int32), is_causal=True, window=3)
    near = KeyBlocks.near(keys, mask.segments_BL, mask)
    blocks = {13: 1, 16: 4}[length]
    assert near.keys_BckD.shape == [B, blocks, 2 * length // blocks, 6]
    seen = (near.bias_Bcik.numpy() == 0).sum((2, 3))
    assert seen.sum(1).tolist() == [sum(min(t, 3) + 1 for t in range(length))] * B


@pytest.mark.parametrize("options", [{}, {"logit_cap": 0.8}, {"dropout_rate": 0.4}])
def test_parts_share_one_softmax(options):
    rng = np.random.default_rng(4)
    query, near, far = (
        rng.normal(size=s).astype("f4") for s in ((B, 5, N, 6), (B, 5, 6), (B, 7, 6))
    )
    biases = [tf.where(rng.random((B, 5, n)) < 0.7, 0.0, MASKED) for n in (5, 7)]
    drop = options.get("dropout_rate")
    dropout = drop and DropoutMask(drop, tf.constant([1, 2]))
    sinks = tf.constant([0.3, -0.2])
    made = SoftmaxOptions(options.get("logit_cap", 0.0), None, dropout, sinks)
    parts = [KeyBlocks.of_row(tf.constant(k), b) for k, b in zip((near, far), biases, strict=True)]
    found = key_blocks.attend(tf.constant(query), parts, made)
    keys, bias = np.concatenate([near, far], 1), tf.concat(biases, -1).numpy()
    factors = dropout.factors([B, 5, N, 12], tf.float32).numpy() if drop else np.ones([B, 5, N, 12])
    for b, i, n in np.ndindex(B, 5, N):
        logits = keys[b].astype(np.float64) @ query[b, i, n]
        if cap := made.cap:
            logits = cap * np.tanh(logits / cap)
        weights = softmax(np.append(logits + bias[b, i], sinks[n]))[:-1]
        assert_close(found[b, i, n], (weights * factors[b, i, n]) @ keys[b], "float32")


@pytest.mark.parametrize("kind", ["heavy", "sparse"])
def test_the_gradient_of_packed_rows_is_that_of_their_texts(kind):
    layer, theta = make(attention_options.compressed(**KINDS[kind]))

    def gradients(rows):
        with tf.GradientTape() as tape:
            tape.watch(list(theta.flatten()))
            total = 0.0
            for x, segments in rows:
                y = layer.fprop(theta, tf.constant(x), layer.mask(tf.constant(segments)))
                total += tf.reduce_sum(tf.where(segments[..., None] > 0, tf.sin(y), 0))
        names = [name for name, _ in theta.flatten_items()]
        found = tape.gradient(total, list(theta.flatten()), unconnected_gradients="zero")
        return dict(zip(names, found, strict=True))

    texts = [
        (X[row : row + 1, here], np.ones([1, here.sum()], np.int32))
        for row, here in ((0, SEGMENTS[0] == 1), (0, SEGMENTS[0] == 2), (1, SEGMENTS[1] == 1))
    ]
    packed, apart = gradients([(X, SEGMENTS)]), gradients(texts)
    assert np.abs(packed["compressor.w_weight"]).max() > 1e-3
    for name, gradient in packed.items():
        assert_close(gradient, apart[name], "float32")
        if "index" in name:
            assert not np.any(gradient)


def test_decoding_steps_equal_the_whole_text():
    p = HyperStack.params().set(num_layers=3, model_dim=M, hidden_dim=12, moe_every=0)
    kinds = [attention_options.compressed(**values) for values in KINDS.values()]
    p.set(is_causal=True, num_heads=N, attention_pattern=tuple(kinds))
    stack, theta = make(p)
    expected = stack.fprop(theta, tf.constant(X), tf.ones([B, L], tf.int32))
    assert_close(run_stepwise(stack, theta, tf.constant(X), None), expected, "float32")


def test_the_cache_has_one_key_for_each_window():
    p = HyperStack.params().set(num_layers=1, model_dim=M, hidden_dim=12, moe_every=0)
    p.set(is_causal=True, num_heads=N, attention_pattern=(attention_options.compressed(),))
    stack, _ = make(p)
    assert transformer.stack_cache_shapes(stack, B, 100) == [{}]
    (shapes,) = transformer.stack_state_shapes(stack, B, 100)
    assert shapes["compressor"] == (B, 1, 50, 6) and shapes["near"] == (B, 1, 3, 6)
    assert shapes["index_compressor"] == (B, 1, 50, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kernel": BlockwiseKernel.params()}, "kernel: BlockwiseKernel cannot mask single keys"),
        ({"is_causal": False}, "is_causal: False; True was expected"),
        ({"output_groups": 5}, "output_groups: 5 does not divide .*attention.head_dim, 12"),
        ({"rotary_dim": 8}, "rotary_dim: 8; an even number up to attention.head_dim, 6"),
        ({"compressed": 0}, "index_heads: 8 with attention.compressed=0"),
    ],
)
def test_what_it_cannot_do_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        make(attention_options.compressed(**values))


def test_counts_the_windows_that_are_chosen():
    layer, _ = make(attention_options.compressed())
    pairs = sum(min(t, 3) + 1 + min((t + 1) // 2, 2) for t in range(L))
    scores = sum((t + 1) // 2 for t in range(L))
    projections = M * (5 + 6) + 5 * N * 6 + N * 6 * 4 + 4 * M
    compressors = M * 2 * 2 * (6 + 4)
    indexer = 5 * 8 * 4 + M * 8
    products = L * (projections + compressors + indexer) + pairs * N * 2 * 6 + scores * 8 * (4 + 1)
    assert flops(layer, TokenShape(B, L)) == 2 * B * products
