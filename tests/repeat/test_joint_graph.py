"""Compares gradients of JointGraph with those of tf.GradientTape."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.wings.repeat.joint_graph import JointGraph
from lingvo_gshard.wings.repeat.minimum_cut import MemoryCosts, TimeCosts

B, M, H = 4, 8, 16
X, W_IN, W_OUT = ([B, M], [M, H], [H, M])
SHIFT = tf.constant(0.5)


def network(x: tf.Tensor, w_in: tf.Tensor, w_out: tf.Tensor) -> list[tf.Tensor]:
    """Computes two products, one after the other. The second output needs only w_in."""
    shared = tf.cast(tf.cast(w_in, tf.bfloat16), tf.float32)
    hidden = tf.nn.relu(tf.exp(x - SHIFT) @ shared)
    return [x + tf.tanh(hidden @ w_out), tf.reduce_sum(w_in)]


def tensors() -> list[tf.Tensor]:
    rng = np.random.default_rng(0)
    return [tf.constant(rng.normal(size=s) / 4, tf.float32) for s in (X, W_IN, W_OUT)]


def joint(make_costs=TimeCosts, function=network, shapes=(X, W_IN, W_OUT)) -> JointGraph:
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    return JointGraph.trace(function, specs[:1], specs[1:], make_costs)


def by_tape(upstream: list[tf.Tensor]) -> tuple[list, list]:
    inputs = tensors()
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = network(*inputs)
    return outputs, tape.gradient(outputs, inputs, output_gradients=upstream)


class JointGraphTest(testing.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("time", TimeCosts), ("memory", lambda inputs: MemoryCosts(inputs, []))
    )
    def test_gradients_equal_those_of_gradient_tape(self, make_costs):
        traced = joint(make_costs)
        upstream = [tf.random.normal(X, seed=1), tf.constant(2.0)]

        @tf.function(autograph=False, jit_compile=True)
        def two_parts(x, *weights):
            outputs, saved = traced.forward([x], weights)
            return outputs, traced.backward(weights, saved, upstream)

        expected = by_tape(upstream)
        for actual, parts in zip(two_parts(*tensors()), expected, strict=True):
            for value, part in zip(actual, parts, strict=True):
                self.assertAllClose(value, part, rtol=1e-5, atol=1e-6)

    def test_time_costs_save_products_and_memory_costs_save_inputs(self):
        saved = joint().saved
        self.assertEqual({tensor.op.type for tensor in saved}, {"Exp", "Relu", "Tanh"})
        self.assertTrue(all(tensor.shape[0] == B for tensor in saved))
        only = joint(lambda inputs: MemoryCosts(inputs, []))
        self.assertEqual([tensor.shape.as_list() for tensor in only.saved], [X])

    def test_saved_products_are_not_recomputed(self):
        products = []

        def function(x, w):
            products[:] = [x @ w]
            return [tf.exp(products[0])]

        traced = joint(lambda inputs: MemoryCosts(inputs, products), function, (X, W_IN))
        self.assertEqual(
            {id(tensor) for tensor in traced.saved},
            {id(traced.forward_inputs[0]), id(products[0])},
        )

    def test_constants_are_computed_in_both_passes(self):
        """Recomputes even expensive ones: not every loop or manual region can read a saved one."""

        def scaled(x):
            factors = tf.linalg.matmul(tf.ones([M, M]), tf.exp(tf.ones([M, M])))
            return [tf.tanh(x @ factors)]

        self.assertEqual(
            [tensor.op.type for tensor in joint(function=scaled, shapes=(X,)).saved], ["Tanh"]
        )

    def test_an_unused_input_has_no_gradient(self):
        def function(x, w, unused):
            return [x * tf.stop_gradient(tf.reduce_sum(w) + unused)]

        traced = joint(TimeCosts, function, (X, W_IN, []))
        self.assertEqual([gradient is None for gradient in traced.gradients], [False, True, True])
        found = tf.function(
            lambda: traced.backward(tensors()[1:2] + [SHIFT], [], [tf.ones(X)]), autograph=False
        )
        self.assertFalse(traced.saved)
        total = np.sum(tensors()[1]) + 0.5
        self.assertAllClose(found()[0], np.full(X, total), rtol=1e-5, atol=0)

    def test_recomputed_operations_are_named(self):
        traced = joint(lambda inputs: MemoryCosts(inputs, []))

        @tf.function(autograph=False)
        def later(x, *weights):
            return traced.backward(weights, [x], [tf.ones(X), tf.constant(1.0)])

        graph = later.get_concrete_function(*tensors()).graph
        products = {op.name for op in graph.get_operations() if op.type == "MatMul"}
        again = {name for name in products if name.startswith("rematerialized/")}
        self.assertEqual(len(again), 2)
        self.assertEqual(len(products - again), 4)

    def test_the_order_of_operations_is_deterministic(self):
        names = []
        for _ in range(2):
            traced = joint()
            later = tf.function(traced.backward, autograph=False).get_concrete_function(
                tensors()[1:],
                [tf.zeros(x.shape) for x in traced.saved],
                [tf.ones(X), tf.constant(1.0)],
            )
            names.append([operation.name for operation in later.graph.get_operations()])
        self.assertEqual(names[0], names[1])

    def test_inner_loops_are_recomputed_with_their_saved_tensors(self):
        def function(x, w):
            return [
                tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y * w)), (0, x))[1]
            ]

        traced = joint(TimeCosts, function, (X, []))
        inputs = [tensors()[0], tf.constant(0.7)]

        @tf.function(autograph=False)
        def two_parts(x, w):
            (output,), saved = traced.forward([x], [w])
            return output, traced.backward([w], saved, [tf.ones(X)])

        with tf.GradientTape() as tape:
            tape.watch(inputs)
            expected = function(*inputs)
        output, gradients = two_parts(*inputs)
        self.assertAllClose(output, expected[0], rtol=1e-6, atol=0)
        for actual, value in zip(gradients, tape.gradient(expected, inputs), strict=True):
            self.assertAllClose(actual, value, rtol=1e-5, atol=0)
        self.assertTrue(all(tensor.dtype != tf.variant for tensor in traced.saved))


if __name__ == "__main__":
    testing.main()
