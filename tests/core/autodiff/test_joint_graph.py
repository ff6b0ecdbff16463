"""A function and its gradient in two parts, beside TensorFlow's own gradient."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.autodiff.joint_graph import JointGraph
from lingvo_gshard.core.autodiff.save_costs import OfMemory, OfTime

B, M, H = 4, 8, 16
X, W_IN, W_OUT = ([B, M], [M, H], [H, M])
SHIFT = tf.constant(0.5)


def network(x: tf.Tensor, w_in: tf.Tensor, w_out: tf.Tensor) -> list[tf.Tensor]:
    """Two products with what is cheap between; a second output has no gradient but for w_in."""
    shared = tf.cast(tf.cast(w_in, tf.bfloat16), tf.float32)
    hidden = tf.nn.relu(tf.exp(x - SHIFT) @ shared)
    return [x + tf.tanh(hidden @ w_out), tf.reduce_sum(w_in)]


def tensors() -> list[tf.Tensor]:
    rng = np.random.default_rng(0)
    return [tf.constant(rng.normal(size=s) / 4, tf.float32) for s in (X, W_IN, W_OUT)]


def joint(costs_of=OfTime, function=network, shapes=(X, W_IN, W_OUT)) -> JointGraph:
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    return JointGraph.trace(function, specs[:1], specs[1:], costs_of, list)


def by_tape(upstream: list[tf.Tensor]) -> tuple[list, list]:
    inputs = tensors()
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = network(*inputs)
    return outputs, tape.gradient(outputs, inputs, output_gradients=upstream)


@pytest.mark.parametrize(
    "costs_of", [OfTime, lambda passing: OfMemory(passing, [])], ids=["time", "memory"]
)
def test_it_is_the_tapes_gradient(costs_of):
    traced = joint(costs_of)
    upstream = [tf.random.normal(X, seed=1), tf.constant(2.0)]

    @tf.function(autograph=False, jit_compile=True)
    def two_parts(x, *weights):
        outputs, kept = traced.forward([x], weights)
        return outputs, traced.backward(weights, kept, upstream)

    expected = by_tape(upstream)
    for actual, parts in zip(two_parts(*tensors()), expected, strict=True):
        for value, part in zip(actual, parts, strict=True):
            np.testing.assert_allclose(value, part, rtol=1e-5, atol=1e-6)


def test_time_is_saved_by_keeping_products_and_memory_by_keeping_what_passes():
    kept = joint().kept
    assert {tensor.op.type for tensor in kept} == {"Exp", "Relu", "Tanh"}
    assert all(tensor.shape[0] == B for tensor in kept)
    only = joint(lambda passing: OfMemory(passing, []))
    assert [tensor.shape.as_list() for tensor in only.kept] == [X]


def test_what_may_be_kept_is_not_computed_again():
    products = []

    def function(x, w):
        products[:] = [x @ w]
        return [tf.exp(products[0])]

    traced = joint(lambda passing: OfMemory(passing, products), function, (X, W_IN))
    assert {id(tensor) for tensor in traced.kept} == {id(traced.passing[0]), id(products[0])}


def test_an_input_without_a_gradient():
    def function(x, w, unused):
        return [x * tf.stop_gradient(tf.reduce_sum(w) + unused)]

    traced = joint(OfTime, function, (X, W_IN, []))
    assert [gradient is None for gradient in traced.gradients] == [False, True, True]
    found = tf.function(
        lambda: traced.backward(tensors()[1:2] + [SHIFT], [], [tf.ones(X)]), autograph=False
    )
    assert not traced.kept
    total = np.sum(tensors()[1]) + 0.5
    np.testing.assert_allclose(found()[0], np.full(X, total), rtol=1e-5)


def test_what_is_computed_again_is_named_so():
    traced = joint(lambda passing: OfMemory(passing, []))

    @tf.function(autograph=False)
    def later(x, *weights):
        return traced.backward(weights, [x], [tf.ones(X), tf.constant(1.0)])

    graph = later.get_concrete_function(*tensors()).graph
    products = {op.name for op in graph.get_operations() if op.type == "MatMul"}
    again = {name for name in products if name.startswith("rematerialized/")}
    assert len(again) == 2 and len(products - again) == 4


def test_a_part_is_made_in_the_same_order_each_time():
    names = []
    for _ in range(2):
        traced = joint()
        later = tf.function(traced.backward, autograph=False).get_concrete_function(
            tensors()[1:], [tf.zeros(x.shape) for x in traced.kept], [tf.ones(X), tf.constant(1.0)]
        )
        names.append([operation.name for operation in later.graph.get_operations()])
    assert names[0] == names[1]


def test_loops_within_are_computed_again_with_what_they_keep():
    def function(x, w):
        return [tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y * w)), (0, x))[1]]

    traced = joint(OfTime, function, (X, []))
    inputs = [tensors()[0], tf.constant(0.7)]

    @tf.function(autograph=False)
    def two_parts(x, w):
        (output,), kept = traced.forward([x], [w])
        return output, traced.backward([w], kept, [tf.ones(X)])

    with tf.GradientTape() as tape:
        tape.watch(inputs)
        expected = function(*inputs)
    output, gradients = two_parts(*inputs)
    np.testing.assert_allclose(output, expected[0], rtol=1e-6)
    for actual, value in zip(gradients, tape.gradient(expected, inputs), strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-5)
    assert all(tensor.dtype != tf.variant for tensor in traced.kept)
