# tests: runtime/lowering/folding.py
"""Checks that index tensors become iotas in every form, and that other tensors do not."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from jax.interpreters import mlir
from jaxlib.mlir import ir

from lingvo_gshard.runtime.lowering.folding import make_iotas
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import partition


def iotas(function, *specs: tf.TensorSpec) -> list[str]:
    """Returns the iotas in the function's StableHLO, such as `iota dim = 0 : tensor<8x2xi32>`."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    text = compiled.experimental_get_compiler_ir(*specs)(stage="stablehlo", platform_name="CPU")
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        make_iotas(module)
        assert module.operation.verify()
        lines = str(module).splitlines()
    return [line.partition("stablehlo.")[2] for line in lines if "stablehlo.iota" in line]


# x keeps TensorFlow from making a constant of all.
@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (
            lambda x: tf.broadcast_to(tf.range(80)[:, None], (80, 3)) + x,
            "dim = 0 : tensor<80x3xi32>",
        ),
        (lambda x: tf.broadcast_to(tf.range(80), (3, 80)) + x, "dim = 1 : tensor<3x80xi32>"),
        (
            lambda x: tf.stack(
                [tf.broadcast_to(tf.range(90)[:, None], (90, 2)), tf.ones([90, 2], tf.int32) * x],
                -1,
            ),
            "dim = 0 : tensor<90x2x1xi32>",
        ),
        (
            lambda x: tf.transpose(tf.broadcast_to(tf.range(70), (2, 1, 70)), (1, 2, 0)) + x,
            "dim = 1 : tensor<1x70x2xi32>",
        ),
        (
            lambda x: tf.constant(np.arange(64)[:, None, None], tf.int32) + x,
            "dim = 0 : tensor<64x1x1",
        ),
    ],
)
def test_index_tensors_become_iotas(function, wanted):
    found = iotas(function, tf.TensorSpec((1, 1), tf.int32))
    assert any(f"iota {wanted}" in line for line in found), found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.broadcast_to(tf.range(1, 81)[:, None], (80, 3)) + x,
        lambda x: tf.broadcast_to(2 * tf.range(80)[:, None], (80, 3)) + x,
        lambda x: tf.reshape(tf.range(80), (8, 10)) + x,
        lambda x: tf.broadcast_to(tf.range(80)[2:50, None], (48, 2)) + x,
        lambda x: tf.constant(np.arange(80)[::-1].reshape(80, 1), tf.int32) + x,
        lambda x: tf.constant(np.zeros((80, 3)), tf.int32) + x,
        lambda x: tf.cast(tf.broadcast_to(tf.range(80), (2, 80)), tf.float32) + 1,
    ],
)
def test_other_tensors_do_not_become_iotas(function):
    found = iotas(function, tf.TensorSpec((1, 1), tf.int32))
    assert not any("x" in line.partition("<")[2].replace("xi32", "") for line in found), found


@hypothesis.given(
    size=st.integers(1, 9),
    others=st.lists(st.integers(1, 4), max_size=2),
    start=st.integers(-1, 1),
    step=st.sampled_from([1, 1, 2]),
    data=st.data(),
)
@hypothesis.settings(max_examples=15)
def test_iotas_keep_the_values(size, others, start, step, data):
    order = data.draw(st.permutations(range(len(others) + 1)))
    kept = data.draw(st.integers(1, size))

    def function(x):
        counted = tf.broadcast_to(start + step * tf.range(size)[:kept], (*others, kept))
        return tf.transpose(counted, order) + x

    expected = np.broadcast_to(start + step * np.arange(size)[:kept], (*others, kept))
    result = partition(function, "one=1")(np.int32(5))
    np.testing.assert_array_equal(result, expected.transpose(order) + 5)


def test_scatter_within_rows_needs_no_communication():
    """Without iotas every device would get all indices."""

    def scatter(places_GS):
        places_GS = annotate(places_GS, "GS")
        rows_GS = tf.broadcast_to(tf.range(16)[:, None], (16, 6))
        indices = tf.stack([rows_GS, places_GS], -1)
        found = tf.tensor_scatter_nd_update(tf.zeros([16, 9], tf.int32), indices, 1 + places_GS)
        return annotate(found, "GC")

    rng = np.random.default_rng(0)
    places = np.stack([rng.permutation(9)[:6] for _ in range(16)]).astype(np.int32)
    run = partition(scatter, "data=8", "data")
    expected = np.zeros((16, 9), np.int32)
    np.put_along_axis(expected, places, 1 + places, 1)
    np.testing.assert_array_equal(run(places), expected)
    assert hlo.count_by_kind(run.compile(places).collectives()) == {}
