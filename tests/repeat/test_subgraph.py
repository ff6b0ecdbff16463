"""Tests finding and copying subgraphs."""

import numpy as np
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.wings.repeat import subgraph


def traced(function, *specs: tf.TensorSpec) -> tf.Graph:
    return tf.function(function, autograph=False).get_concrete_function(*specs).graph


VECTOR = tf.TensorSpec([3], tf.float32)


class SubgraphTest(testing.TestCase):
    def test_dependents_of_a_tensor(self):
        def function(x, y):
            tf.exp(x, name="a")
            both = tf.add(x, y, name="b")
            tf.fill(tf.raw_ops.Shape(input=both, name="shape"), 1.0, name="c")

        graph = traced(function, VECTOR, VECTOR)
        y = graph.inputs[1]
        names = {operation.name for operation in subgraph.dependents([y])}
        self.assertContainsSubset({"b", "shape", "c"}, names)
        self.assertNotIn("a", names)
        but_shapes = subgraph.dependents([y], ignoring=["Shape"])
        self.assertEqual({operation.name for operation in but_shapes}, {y.op.name, "b"})

    def test_a_result_of_identities_depends_on_its_own_input_alone(self):
        """tf.custom_gradient passes results and arguments through one IdentityN."""
        found = []

        def function(x, y):
            left, right = tf.raw_ops.IdentityN(input=[x, y])
            found.extend([tf.exp(left), tf.exp(right)])

        graph = traced(function, VECTOR, VECTOR)
        names = subgraph.dependent_tensors([graph.inputs[1]])
        left, right = found
        self.assertNotIn(left.name, names)
        self.assertIn(right.name, names)
        without = subgraph.dependent_tensors([graph.inputs[1]], ignoring=["Exp"])
        self.assertNotIn(right.name, without)

    def test_a_copy_starts_from_the_given_values(self):
        found = []

        def function(x, y):
            product = x * y
            found.extend([product, tf.exp(product), y])

        graph = traced(function, VECTOR, VECTOR)
        product, exponential, y = found
        self.assertEqual(subgraph.ancestors([exponential], {product.name}), {exponential.op})

        @tf.function(autograph=False)
        def again(value, other):
            known = {product.name: value, y.name: other}
            return subgraph.copy_into_current_graph(
                [exponential, y, product], known, lambda operation: "again/"
            )

        value, other = tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0, 6.0])
        results = again(value, other)
        self.assertAllClose(results[0], np.exp([1.0, 2.0, 3.0]), rtol=1e-6, atol=0)
        self.assertAllEqual(results[1], other)
        self.assertAllEqual(results[2], value)
        operations = again.get_concrete_function(value, other).graph.get_operations()
        self.assertIn(f"again/{exponential.op.name}", {operation.name for operation in operations})
        self.assertFalse(any(operation.type == "Mul" for operation in operations))
        with self.assertRaisesRegex(
            ValueError, f"{graph.inputs[0].op.name}: this placeholder has no known value"
        ):
            subgraph.copy_into_current_graph([product], {y.name: other})

    def test_called_functions_are_copied(self):
        found = []

        def function(x):
            found.append(tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, 2 * y), (0, x))[1])

        graph = traced(function, VECTOR)

        @tf.function(autograph=False, jit_compile=True)
        def again(x):
            return subgraph.copy_into_current_graph(found, {graph.inputs[0].name: x})[0]

        self.assertAllEqual(again(tf.ones([3])), [8.0, 8.0, 8.0])


if __name__ == "__main__":
    testing.main()
