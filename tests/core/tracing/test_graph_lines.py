"""Operations of traced graphs are found under the names that compiled programs give them."""

import inspect

import pytest
import tensorflow as tf

from lingvo_gshard.core.tracing import source_lines
from lingvo_gshard.core.tracing.source_lines import GraphLines


def compute(x):
    with tf.name_scope("layer"):
        y = tf.exp(x)
        z = tf.tanh(y)
    return tf.gradients(z, x)


def _line(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"test_graph_lines.py:{first + next(i for i, x in enumerate(lines) if text in x)}"


@pytest.fixture(scope="module")
def lines():
    graph = tf.Graph()
    with graph.as_default():
        compute(tf.zeros([3]))
    return GraphLines([graph])


@pytest.mark.parametrize(
    "name",
    [
        "layer/Exp",
        "rematerialized/layer/Exp",
        "call.9/call.8/stack/while/PartitionedCall/layer/Exp/pfor/Exp",
        "stack/while/PartitionedCall_1/StatefulPartitionedCall/layer/Exp",
        # A part of the operation, or of its body if it is a loop.
        "layer/Exp/while/body/add",
    ],
)
def test_an_operation_is_found_under_its_names_in_programs(lines, name):
    assert lines.operation(name).name == "layer/Exp"
    assert lines.line(name) == _line(compute, "tf.exp")


def test_unknown_names_have_no_line(lines):
    assert lines.operation("layer2/Exp") is None and lines.line("layer2/Exp") == ""
    assert lines.line("") == ""


def test_operations_are_in_the_order_of_tracing(lines):
    assert lines.order["layer/Exp"] < lines.order["layer/Tanh"]


def differentiate(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tf.name_scope("layer"):
            y = tf.nn.relu(x)
            z = tf.nn.relu(y[:2])
            t = tf.nn.tanh(x)
    return tape.gradient([y, z, t], x)


def test_a_gradient_belongs_to_the_line_that_it_differentiates(monkeypatch):
    # A trainer calls the tape, and its lines are none of the model.
    tape_line = _line(differentiate, "return tape")
    own = source_lines.line_of_operation
    monkeypatch.setattr(
        source_lines, "line_of_operation", lambda o: own(o) if own(o) != tape_line else ""
    )
    traced = tf.function(differentiate).get_concrete_function(tf.TensorSpec([3])).graph
    lines = GraphLines([traced])
    gradients = [o for o in traced.get_operations() if o.type in ("ReluGrad", "TanhGrad")]
    found = {(o.type, tuple(o.outputs[0].shape)): lines.line(o.name) for o in gradients}
    assert found == {
        ("ReluGrad", (3,)): _line(differentiate, "y = "),
        ("ReluGrad", (2,)): _line(differentiate, "z = "),
        ("TanhGrad", (3,)): _line(differentiate, "t = "),
    }
