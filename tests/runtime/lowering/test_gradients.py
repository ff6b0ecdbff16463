# tests: runtime/lowering/lowering.py, wings/functions/partition.py, sharding/xla.py
"""Checks gradients of TensorFlow's and Keras's operations over meshes against one device."""

import functools

import jax
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.functions.partition import partition
from tests.runtime.lowering.operations import OPERATIONS

# The axes of rows, of positions and of features, and of the last dimension of weights. An axis of
# the mesh that is not named splits nothing.
SPLITS = {
    "rows": ("data", "", "", ""),
    "rows and features": ("data", "", "model", ""),
    "rows and weights": ("data", "", "", "model"),
    "features and weights": ("", "", "model", "model"),
    "positions": ("", "model", "", ""),
    "rows and positions": ("data", "model", "", ""),
}
MESHES = ("data=4,model=2", "data=2,model=2,other=2")


def splits_of(shapes, split):
    """Returns the split of each tensor: of the first by its dimensions, of others by their last."""
    rows, positions, features, weights = split
    first = shapes[0]
    found = []
    for shape in shapes:
        is_like_first = len(shape) == len(first) and shape[0] == first[0]
        axes = [""] * len(shape)
        if is_like_first:
            axes[0], axes[-1] = rows, features
            axes[1:-1] = [positions, *[""] * (len(shape) - 3)] if len(shape) > 2 else []
        else:
            axes[-1] = weights
        found.append(tuple((axis,) if axis else () for axis in axes))
    return found


def with_gradients(function):
    """Returns a function of tensors that returns a result and the gradients of the tensors."""

    def compute(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            result = function(*tensors)
        found = tape.gradient(result, tensors, output_gradients=tf.cos(3 * result))
        return result, *map(tf.convert_to_tensor, found)

    return compute


@functools.cache
def on_one_device(name):
    """Returns an operation with gradients, the tensors, and their results on one device."""
    function, shapes = OPERATIONS[name]()
    draw = np.random.default_rng(sum(map(sum, shapes)))
    tensors = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    compute = with_gradients(function)
    results = tf.function(compute, jit_compile=True, autograph=False)(*map(tf.constant, tensors))
    return compute, tensors, [result.numpy() for result in results]


def check(name, mesh, split, partitioner):
    """Compares an operation and its gradients, which are split as its tensors, with one device."""
    compute, tensors, expected = on_one_device(name)
    over = Mesh.parse(mesh)
    splits = splits_of([tensor.shape for tensor in tensors], SPLITS[split])

    def split_gradients(*tensors):
        result, *found = compute(*tensors)
        # XLA may choose a split for the result that jax cannot express.
        result = xla.tile(
            result, splits_of([tensors[0].shape, result.shape], SPLITS[split])[1], over
        )
        return result, *(xla.tile(g, s, over) for g, s in zip(found, splits, strict=True))

    run = partition(split_gradients, mesh, layouts=splits, partitioner=partitioner)
    for one, other in zip(run(*tensors), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-4 * np.abs(other).max())


def check_or_refused(name, mesh, split, partitioner):
    """As `check`, but lets XLA for CPU refuse a Fourier transform, as docs/keras.md says."""
    try:
        check(name, mesh, split, partitioner)
    except jax.errors.JaxRuntimeError as error:
        if "fft_thunk" not in str(error) or split == "rows":
            raise


FAST = (
    *("conv2d", "conv2d grouped", "depthwise strides", "depthwise uneven rows"),
    *("max pool2d", "average pool2d", "every second row", "lstm"),
)


@pytest.mark.parametrize("split", ["rows", "rows and positions"])
@pytest.mark.parametrize("name", FAST)
def test_gradients(name, split):
    check(name, MESHES[0], split, "gspmd")


@pytest.mark.parametrize("name", ["depthwise", "conv2d grouped", "max pool2d"])
def test_gradients_under_shardy(name):
    check(name, MESHES[0], "rows", "shardy")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_all_gradients(name, split, mesh):
    check_or_refused(name, mesh, split, "gspmd")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["rows", "rows and positions"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_all_gradients_under_shardy(name, split):
    check_or_refused(name, MESHES[1], split, "shardy")
