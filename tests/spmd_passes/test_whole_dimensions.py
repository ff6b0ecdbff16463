# tests: wings/spmd_passes/whole_dimensions.py, wings/spmd_passes/builders.py
# tests: wings/spmd_passes/value_splits.py, wings/spmd_passes/passes.py
"""Checks values of operations along dimensions that XLA's partitioner cannot split."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.manual import manual
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.options import PARTITIONERS
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.spmd_passes import passes


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def run(function, arguments, splits, split, mesh, partitioner):
    """Returns the result of a function whose arguments and result are split."""
    over = Mesh.parse(mesh)

    def tiled(*tensors):
        return xla.tile(function(*tensors), split, over)

    compute = partition(tiled, mesh, layouts=splits, partitioner=partitioner)
    return np.asarray(compute(*arguments))


def of(*dimensions: str) -> tuple[tuple[str, ...], ...]:
    return tuple((axis,) if axis.strip() else () for axis in dimensions)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize(
    ("mesh", "split"), [("a=2", of("a", "")), ("a=4,b=2", of("a", "")), ("a=2,b=2", of("a", "b"))]
)
def test_gradients_of_slices_with_strides(mesh, split, partitioner):
    def pad(d):
        with tf.GradientTape() as tape:
            x = tf.zeros((8, 7))
            tape.watch(x)
            y = tf.reduce_sum(x[::3, ::2] * d)
        return tape.gradient(y, x)

    d = array(3, 4)
    found = run(pad, [d], [of("", "")], split, mesh, partitioner)
    expected = np.zeros((8, 7), np.float32)
    expected[::3, ::2] = d
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize(
    ("mesh", "size", "strides", "splits", "split"),
    [
        ("a=4", (2, 1), (1, 2), [of("", "a", "", ""), of("", "", "a", "")], of("", "", "", "")),
        ("a=2,b=2", (2, 2), (2, 1), [of("", "", "a", ""), of("", "", "b", "")], of(*"    ")),
        ("a=2,b=2,c=2", (3, 2), (1, 1), [of("", "", "", "a"), of("c", "", "", "")], of(*" ca ")),
        ("a=4,b=2", (3, 2), (2, 1), [of("", "", "b", ""), of("a", "", "b", "")], of(*"b   ")),
    ],
)
def test_gradients_of_max_pooling(mesh, size, strides, splits, split, partitioner):
    x = array(8, 8, 8, 2)

    def gradient(x, d):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.nn.max_pool2d(x, size, strides, "VALID") * d)
        return tape.gradient(y, x)

    d = array(8, *((8 - n) // s + 1 for n, s in zip(size, strides, strict=True)), 2)
    expected = np.zeros_like(x)
    for b, i, j, c in np.ndindex(d.shape):
        top, left = strides[0] * i, strides[1] * j
        window = x[b, top : top + size[0], left : left + size[1], c]
        row, column = np.unravel_index(window.argmax(), window.shape)
        expected[b, top + row, left + column, c] += d[b, i, j, c]
    found = run(gradient, [x, d], splits, split, mesh, partitioner)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize(
    ("shape", "splits", "split"),
    [
        # XLA refuses features that two axes split, or ends the process.
        ((1, 2, 4), [of("", "", "a"), of("", "", "b")], of("", "", "b")),
        ((1, 4, 4), [of("", "", "a"), of("", "", "b")], of("a", "", "")),
        ((2, 1, 8), [of("a", "", "b"), of("", "", "b")], of("a", "", "b")),
        ((2, 8, 8), [of("", "b", ""), of("b", "", "")], of("", "", "a")),
        ((2, 8, 8), [of("a", "b", ""), of("", "", "")], of("a", "b", "")),
    ],
)
def test_convolutions(shape, splits, split, partitioner):
    x, w = array(8, 8, 8), array(*shape)
    width, size, outputs = shape
    expected = np.zeros((8, 9 - width, outputs), np.float32)
    for k, o in np.ndindex(width, outputs):
        group = o // (outputs * size // 8)
        inputs = x[:, k : k + 9 - width, group * size : (group + 1) * size]
        expected[:, :, o] += inputs @ w[k, :, o]

    def convolution(x, w):
        return tf.nn.conv1d(x, w, 1, "VALID")

    found = run(convolution, [x, w], splits, split, "a=2,b=2", partitioner)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("mesh", ["a=4,b=2", "a=2,b=2,c=2"])
@pytest.mark.parametrize("split", [of("a", ""), of("", "")])
def test_sums_of_uneven_segments(mesh, split, partitioner):
    segments, rows = np.array([6, 5, 4, 2, 2], np.int32), array(5, 8)
    over = Mesh.parse(mesh)

    def sums(rows, segments):
        # What pads the rows is not zero.
        rows = xla.tile(tf.cos(xla.tile(rows, of("a", ""), over)), of("a", ""), over)
        return tf.math.unsorted_segment_sum(rows, segments, 8)

    found = run(sums, [rows, segments], [of("", ""), of("")], split, mesh, partitioner)
    expected = np.zeros((8, 8), np.float32)
    np.add.at(expected, segments, np.cos(rows))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_operations_in_manual_regions_stay_as_they_are(monkeypatch):
    region = manual(lambda x: tf.nn.max_pool1d(x, 2, 2, "SAME"), [of("a", "", "")], of("a", "", ""))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(region(x) ** 2)
        return tape.gradient(y, x)

    x = array(8, 4, 2)
    found = partition(gradient, "a=4,b=2")(x)
    largest = x.reshape(8, 2, 2, 2).max(2, keepdims=True)
    expected = np.where(x.reshape(8, 2, 2, 2) == largest, 2 * largest, 0).reshape(x.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    rewritten = partition(gradient, "a=4,b=2").lower(x).module
    monkeypatch.setattr(passes, "keep_whole", lambda module, mesh: None)
    assert partition(gradient, "a=4,b=2").lower(x).module == rewritten
