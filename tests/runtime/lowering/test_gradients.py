"""Checks gradients of TensorFlow's and Keras's operations over meshes against one device."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.runtime.partition import partition
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.options import PARTITIONERS
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
MESHES = ("data=4,model=2", "data=2,model=4", "data=2,model=2,other=2")


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


def gradients(function, cotangent):
    """Returns a function of the tensors that returns their gradients."""

    def compute(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            result = function(*tensors)
        return result, *tape.gradient(result, tensors, output_gradients=cotangent(result))

    return compute


def check(name, mesh, split, partitioner):
    function, shapes = OPERATIONS[name]()
    draw = np.random.default_rng(sum(map(sum, shapes)))
    tensors = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    compute = gradients(function, lambda result: tf.cos(3 * result))
    expected = tf.function(compute, jit_compile=True, autograph=False)(*map(tf.constant, tensors))
    over, splits = Mesh.parse(mesh), splits_of(shapes, SPLITS[split])

    def split_gradients(*tensors):
        result, *found = compute(*tensors)
        return result, *(xla.tile(g, s, over) for g, s in zip(found, splits, strict=True))

    run = partition(split_gradients, mesh, layouts=splits, partitioner=partitioner)
    for one, other in zip(run(*tensors), expected, strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(one / scale, other / scale, atol=2e-4)


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
    check(name, MESHES[1], "rows", "shardy")


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_all_gradients(name, split, mesh, partitioner):
    check(name, mesh, split, partitioner)
