# tests: wings/tracing/source_lines.py
"""Finds operations of traced graphs under the names that compiled programs give them."""

import functools
import inspect
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.wings.tracing import source_lines
from lingvo_gshard.wings.tracing.source_lines import GraphLines


def compute(x):
    with tf.name_scope("layer"):
        y = tf.exp(x)
        z = tf.tanh(y)
    return tf.gradients(z, x)


def _line(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"test_graph_lines.py:{first + next(i for i, x in enumerate(lines) if text in x)}"


@functools.cache
def lines_of_compute():
    graph = tf.Graph()
    with graph.as_default():
        compute(tf.zeros([3]))
    return GraphLines([graph])


def differentiate(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tf.name_scope("layer"):
            y = tf.nn.relu(x)
            z = tf.nn.relu(y[:2])
            t = tf.nn.tanh(x)
    return tape.gradient([y, z, t], x)


class GraphLinesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        "layer/Exp",
        "rematerialized/layer/Exp",
        "call.9/call.8/stack/while/PartitionedCall/layer/Exp/pfor/Exp",
        "stack/while/PartitionedCall_1/StatefulPartitionedCall/layer/Exp",
        # A part of the operation, or of its body if it is a loop.
        "layer/Exp/while/body/add",
    )
    def test_an_operation_is_found_under_its_names_in_programs(self, name):
        self.assertEqual(lines_of_compute().operation(name).name, "layer/Exp")
        self.assertEqual(lines_of_compute().line(name), _line(compute, "tf.exp"))

    def test_unknown_names_have_no_line(self):
        lines = lines_of_compute()
        self.assertIsNone(lines.operation("layer2/Exp"))
        self.assertEqual(lines.line("layer2/Exp"), "")
        self.assertEqual(lines.line(""), "")

    def test_operations_are_in_the_order_of_tracing(self):
        order = lines_of_compute().order
        self.assertLess(order["layer/Exp"], order["layer/Tanh"])

    def test_a_gradient_belongs_to_the_line_that_it_differentiates(self):
        # A trainer calls the tape, and its lines are none of the model.
        tape_line = _line(differentiate, "return tape")
        own = source_lines.line_of_operation

        def line_of_operation(operation):
            return own(operation) if own(operation) != tape_line else ""

        self.enter_context(mock.patch.object(source_lines, "line_of_operation", line_of_operation))
        traced = tf.function(differentiate).get_concrete_function(tf.TensorSpec([3])).graph
        lines = GraphLines([traced])
        gradients = [o for o in traced.get_operations() if o.type in ("ReluGrad", "TanhGrad")]
        found = {(o.type, tuple(o.outputs[0].shape)): lines.line(o.name) for o in gradients}
        self.assertEqual(
            found,
            {
                ("ReluGrad", (3,)): _line(differentiate, "y = "),
                ("ReluGrad", (2,)): _line(differentiate, "z = "),
                ("TanhGrad", (3,)): _line(differentiate, "t = "),
            },
        )


if __name__ == "__main__":
    testing.main()
