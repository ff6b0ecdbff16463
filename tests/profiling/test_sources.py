# tests: wings/tracing/source_lines.py, wings/profiling/observer.py
"""Tests the lines of operations, which are looked up in a second trace of the step."""

import inspect

import pytest

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.profiling.observer import SourceLines
from lingvo_gshard.wings.tracing.source_lines import line_of_operation
from tests import tiny


@pytest.fixture(scope="module")
def lines():
    params = tiny.experiment_params(4)
    return SourceLines(experiments.make_trainer(params), experiments.batch_specs(params), None)


def line_with(text):
    """Returns the file and line of tests/tiny.py that has a text."""
    numbered = enumerate(inspect.getsource(tiny).splitlines(), start=1)
    return f"tiny.py:{next(number for number, line in numbered if text in line)}"


@pytest.mark.parametrize(
    ("op_name", "text"),
    [
        ("hidden/MatMul", "y_BH = tf.matmul(x_BM, theta.w)"),
        ("gradient_tape/hidden/MatMul_1", "y_BH = tf.matmul(x_BM, theta.w)"),
        ("rematerialized/output/MatMul", "y_BH = tf.matmul(x_BM, theta.w)"),
        # An operation that only the compiler has: the layer's own line.
        ("hidden/never_traced", "def fprop(self, theta, x_BM, training)"),
    ],
)
def test_lines_of_the_model(lines, op_name, text):
    found = lines.of(op_name)
    file, number = line_with(text).split(":")
    # Python 3.11 counts the decorator's line as the first one of a function.
    assert found in (f"{file}:{number}", f"{file}:{int(number) - 1}")


def test_the_optimizer_has_its_class_and_other_names_have_nothing(lines):
    assert lines.of("optimizer/hidden/w/mul").startswith("lingvo_gshard/training/step/adam.py:")
    assert lines.of("") == lines.of("copy") == ""


def test_operations_of_copied_functions_have_no_line():
    operation = type("Operation", (), {"traceback": None})()
    assert line_of_operation(operation) == ""
    with tf.Graph().as_default():
        assert line_of_operation(tf.constant(1.0).op).startswith("test_sources.py:")
