# tests: wings/spmd_passes/partial_operations.py, wings/spmd_passes/value_splits.py
# tests: wings/spmd_passes/loop_sums.py
"""Checks that terms of a sum are added before they are reduced over devices, by compiled HLO."""

import functools

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_gshard.layers.embedding import TokenEmbedding
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.sharding import annotate, annotate_weights, einsum
from lingvo_gshard.sharding.options import PARTITIONERS
from lingvo_gshard.wings.functions.partition import partition

B, L, M, N, D, V = 8, 16, 32, 8, 4, 64
SIZES = {"B": B, "L": L, "M": M, "N": N, "D": D, "V": V, "H": 32}

each_partitioner = pytest.mark.parametrize("partitioner", PARTITIONERS)


def array(layout: str, seed: int = 0) -> np.ndarray:
    shape = [SIZES[letter] for letter in layout]
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(function, arguments, mesh, strategy, partitioner="gspmd") -> list[tuple]:
    """Compares results with those on one device, and returns (kind, axes, bytes) of collectives."""
    expected = tf.nest.flatten(partition(function, "data=1")(*arguments))
    partitioned = partition(function, mesh, strategy, partitioner=partitioner)
    found = tf.nest.flatten(partitioned(*arguments))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    calls = partitioned.compile(*arguments).collectives()
    return sorted((call.kind, ",".join(call.axes), call.bytes) for call in calls)


def attention_projections(x, w_query, w_key, w_value, d_BLND):
    """Returns the gradients of three projections of one input, written as a plain function."""
    x = annotate(x, "BLM")
    weights = [annotate(w, "MND", "weights") for w in (w_query, w_key, w_value)]
    with tf.GradientTape() as tape:
        tape.watch([x, *weights])
        query, key, value = (einsum("BLM,MND->BLND", x, w) for w in weights)
        y = query * tf.sigmoid(key) * value
    d_x, *d_weights = tape.gradient(y, [x, *weights], annotate(d_BLND, "BLND"))
    d_weights = [annotate(d, "MND", "weights") for d in d_weights]
    return [annotate(d_x, "BLM"), *d_weights]


PROJECTED = [array("BLM"), *(array("MND", seed) for seed in (1, 2, 3)), array("BLND", 4)]


@each_partitioner
def test_gradients_of_queries_keys_and_values_are_added_before_they_are_reduced(partitioner):
    found = check(attention_projections, PROJECTED, "model=8", "tensor", partitioner)
    assert found == [("all-reduce", "model", 4 * B * L * M)]


def test_each_weight_is_gathered_once_for_both_passes():
    found = check(attention_projections, PROJECTED, "data=4,model=2", "fsdp_tensor")
    weight, rows = 4 * M * N * D // 2, 4 * B * L * M // 4
    assert found == [
        *[("all-gather", "data", weight)] * 3,
        ("all-reduce", "data", 3 * weight),
        ("all-reduce", "model", rows),
    ]


@functools.cache
def table_layer() -> TokenEmbedding:
    params = TokenEmbedding.params().set(vocabulary_size=V, model_dim=M, is_softmax_weight=True)
    return params.instantiate(path="embedding")


def tied_table(table, source_BL, target_BL, x_BLM):
    """Returns the gradient of a table that is looked up twice and is the weight of a softmax."""
    layer = table_layer()
    specs = layer.variable_specs()
    theta = annotate_weights(specs.pack([table]), specs)
    with tf.GradientTape() as tape:
        tape.watch(theta)
        memory = layer.fprop(theta, annotate(source_BL, "BL"))
        x = layer.fprop(theta, annotate(target_BL, "BL")) * memory + annotate(x_BLM, "BLM")
        total = tf.reduce_sum(tf.sin(layer.logits(theta, x)), [1, 2])
    return annotate_weights(tape.gradient(total, theta), specs)


@pytest.mark.parametrize(
    ("mesh", "strategy", "table"),
    [
        ("data=8", "data", [("all-reduce", "data", 4 * V * M)]),
        (
            "data=8",
            "fsdp",
            [("all-gather", "data", 4 * V * M), ("all-reduce", "data", 4 * V * M)],
        ),
        (
            "data=4,fsdp=2",
            "expert_fsdp",
            [("all-gather", "data,fsdp", 4 * V * M), ("all-reduce", "data,fsdp", 4 * V * M)],
        ),
        ("data=4,model=2", "data_tensor", [("all-reduce", "data", 4 * V * M // 2)]),
        ("data=4,context=2", "data_context", [("all-reduce", "data,context", 4 * V * M)]),
    ],
)
@pytest.mark.parametrize("partitioner", ["gspmd", pytest.param("shardy", marks=pytest.mark.slow)])
def test_a_tied_tables_gradient_is_reduced_once(mesh, strategy, table, partitioner):
    rng = np.random.default_rng(5)
    ids = [rng.integers(0, V, (B, L)).astype(np.int32) for _ in range(2)]
    arguments = [0.1 * array("VM"), *ids, array("BLM", 6)]
    found = check(tied_table, arguments, mesh, strategy, partitioner)
    assert [call for call in found if "model" not in call[1]] == table
    # The rows of both lookups, and the gradient of the softmax's input.
    rows = sum(size for _, axes, size in found if "model" in axes)
    assert rows == (3 * 4 * B * L * M // 4 if "model" in mesh else 0)


def test_the_gradient_of_a_gated_layers_input_is_reduced_once():
    params = FeedForward.params().set(model_dim=M, hidden_dim=32, activation="swiglu")
    layer = params.set(use_bias=False).instantiate(path="feed_forward")
    specs = layer.variable_specs()

    def gradient(x_BLM, *weights):
        x_BLM, theta = annotate(x_BLM, "BLM"), annotate_weights(specs.pack(weights), specs)
        with tf.GradientTape() as tape:
            tape.watch(x_BLM)
            y = layer.fprop(theta, x_BLM, tf.ones([B, L], tf.int32))
        return annotate(tape.gradient(y, x_BLM), "BLM")

    weights = [array(spec.layout, seed) for seed, spec in enumerate(specs.flatten())]
    found = check(gradient, [array("BLM"), *weights], "model=8", "tensor")
    # The sum of the output is not needed.
    assert found == [("all-reduce", "model", 4 * B * L * M)]


def test_sums_over_rows_are_added_before_they_are_reduced():
    def function(x, y, z):
        x, y = annotate(x, "BLM"), annotate(y, "BLM")
        return annotate(tf.reduce_sum(x, [0, 1]) + tf.reduce_sum(y * y, [0, 1]) + z, "M")

    arguments = [array("BLM"), array("BLM", 1), array("M", 2)]
    assert check(function, arguments, "data=8", "data") == [("all-reduce", "data", 4 * M)]
    found = check(function, arguments, "data=4,context=2", "data_context")
    assert found == [("all-reduce", "data,context", 4 * M)]


def test_a_term_that_is_used_elsewhere_stays_as_it_is():
    def function(x, y, w):
        x, y, w = annotate(x, "BLH"), annotate(y, "BLH"), annotate(w, "HM", "weights")
        first, second = einsum("BLH,HM->BLM", x, w), einsum("BLH,HM->BLM", y, w)
        return first + second, tf.tanh(first)

    arguments = [array("BLH"), array("BLH", 1), array("HM", 2)]
    found = check(function, arguments, "model=8", "tensor")
    assert sum(size for _, _, size in found) == 2 * 4 * B * L * M


# Products and reductions that end in "LM", and what each is of.
TERMS = {
    "BLH,BHM->LM": ("BLH", "BHM"),
    "BLH,HM->LM": ("BLH", "HM"),
    "BLN,BNM->LM": ("BLN", "BNM"),
    "BLM->LM": ("BLM",),
    "LH,HM->LM": ("LH", "HM"),
    "MH,LH->ML": ("MH", "LH"),
    "LM": ("LM",),
}


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    st.lists(st.sampled_from(sorted(TERMS)), min_size=2, max_size=5),
    st.sampled_from(
        [
            ("data=4,model=2", "data_tensor"),
            ("data=2,fsdp=2,model=2", "fsdp_tensor"),
            ("data=2,context=2,model=2", "data_context_tensor"),
            ("data=4,model=2", "data_sequence_tensor"),
        ]
    ),
    st.booleans(),
)
def test_sums_of_any_terms_are_those_of_one_device(terms, layout, is_negated):
    arguments = [[array(part, i) for i, part in enumerate(TERMS[term])] for term in terms]

    def function(*arguments):
        total = 0.0
        for term, parts in zip(terms, arguments, strict=True):
            parts = [annotate(x, y) for x, y in zip(parts, TERMS[term], strict=True)]
            if "->" in term:
                value = tf.einsum(term, *parts)
            else:
                (value,) = parts
            value = tf.transpose(value) if term.endswith("ML") else value
            total = annotate(total + value, "LM")
            total = -total if is_negated else total
        return total

    check(function, arguments, *layout)
