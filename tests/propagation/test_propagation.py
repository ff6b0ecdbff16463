# tests: wings/propagation/propagated.py, wings/propagation/activations.py, sharding/recording.py
"""What XLA's sharding propagation decided is read with layer and line, on small layers."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import Layer, layer_method, scope_name
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.sharding import annotate, einsum, recording
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.propagation.activations import activations
from lingvo_gshard.wings.propagation.propagated import Traced, compile_with_shardings, reshardings

SIZES = {"B": 8, "L": 4, "M": 16, "H": 32}
ROWS = Partitioning.make("data=4", "B->data")
ROWS_AND_HIDDEN = Partitioning.make("data=2,model=2", "B->data; H->model | weights: H->model")


class Block(Layer):
    """A feed-forward layer; correct as it is."""

    def __init__(self, params, path="block"):
        super().__init__(params, path)
        self.create_variable("w_in", "MH", SIZES, initializers.fan_in(16))
        self.create_variable("w_out", "HM", SIZES, initializers.fan_in(32))

    @layer_method
    def fprop(self, theta, x_BLM):
        h_BLH = einsum("BLM,MH->BLH", x_BLM, theta.w_in)
        h_BLH = tf.nn.relu(h_BLH)
        return einsum("BLH,HM->BLM", h_BLH, theta.w_out)


class Forgotten(Block):
    """Merges positions and rows, after which XLA does not know how rows are split."""

    @layer_method
    def fprop(self, theta, x_BLM):
        x_TM = tf.reshape(tf.transpose(x_BLM, [1, 0, 2]), [-1, 16])
        h_TH = tf.nn.relu(x_TM @ theta.w_in)
        y_LBM = tf.reshape(h_TH @ theta.w_out, [4, 8, 16])
        return annotate(tf.transpose(y_LBM, [1, 0, 2]), "BLM")


class Gathering(Block):
    """Annotates the hidden dimension as whole."""

    @layer_method
    def fprop(self, theta, x_BLM):
        h_BLH = tf.nn.relu(einsum("BLM,MH->BLH", x_BLM, theta.w_in))
        h_BLH = annotate(h_BLH, "BL_")
        return einsum("BLH,HM->BLM", h_BLH, theta.w_out)


class Looping(Block):
    """Computes the same in a loop."""

    @layer_method
    def fprop(self, theta, x_BLM):
        one = super().fprop
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, one(theta, x)), (0, x_BLM))[1]


def line_in(layer, text):
    """Returns the file and line of the line of a class that contains a text."""
    lines, first = inspect.getsourcelines(layer)
    (found,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"test_propagation.py:{found}"


def found_in(layer_class, partitioning=ROWS_AND_HIDDEN, partitioner="gspmd"):
    """Returns the activations and the reshardings of a layer."""
    layer = layer_class(layer_class.params())
    specs = layer.variable_specs()

    def step(x_BLM, *weights):
        y_BLM = layer.fprop(specs.pack(weights), annotate(x_BLM, "BLM"))
        return [("y", y_BLM, None)]

    weights = [
        Array(f"theta.{s.path}", s.shape, s.dtype, partitioning.spec_storage_split(s))
        for s in specs.flatten()
    ]
    inputs = [Array("batch.x", (8, 4, 16), "float32", None), *weights]
    with recording.record() as recorded:
        program = lower("step", step, inputs, partitioning, partitioner=partitioner)
    mesh = program.mesh
    executable, module = compile_with_shardings(program, devices_for(mesh.size))
    paths = ["", *layer.layer_paths()]
    traced = Traced(recorded, paths, mesh)
    calls = executable.collectives(map(scope_name, paths))
    rows = activations(module, program.inputs, traced, mesh)
    return rows, reshardings(calls, module, traced, mesh)


@pytest.mark.parametrize("partitioner", ["gspmd", "shardy"])
def test_activations_have_what_was_asked_and_what_xla_chose(partitioner):
    rows, moved = found_in(Block, partitioner=partitioner)
    assert moved == []
    rows = [row for row in rows if row.layer == "block"]
    hidden, relu, output = rows
    assert (hidden.layout, hidden.asked, hidden.chosen) == (
        ("BLH", "B over data, H over model", "B over data, H over model")
    )
    assert hidden.source == line_in(Block, "BLM,MH->BLH") and hidden.operations == ("Einsum",)
    assert (relu.layout, relu.asked, relu.operations) == ("", "", ("Relu",))
    assert relu.chosen == "dimension 0 over data, dimension 2 over model"
    assert (relu.parts, relu.bytes, relu.bytes_per_device) == (4, 4 * 8 * 4 * 32, 4 * 4 * 4 * 16)
    assert (output.layout, output.chosen, output.shape) == ("BLM", "B over data", (8, 4, 16))


def test_a_forgotten_annotation_leaves_a_tensor_whole():
    rows, moved = found_in(Forgotten, ROWS)
    whole = {row.source: row for row in rows if row.parts == 1}
    relu = whole[line_in(Forgotten, "tf.nn.relu")]
    assert (relu.layer, relu.asked, relu.shape) == ("block", "", (32, 32))
    assert relu.bytes == relu.bytes_per_device == 4 * 32 * 32
    (gather,) = [row for row in moved if row.source == line_in(Forgotten, "x_TM = tf.reshape")]
    assert (gather.kind, gather.layer, gather.phase) == ("all-gather", "block", "forward")
    assert (gather.before, gather.after) == ("dimension 1 over data", "whole")


def test_the_annotation_that_causes_an_all_gather_is_named():
    _, moved = found_in(Gathering)
    (gather,) = [row for row in moved if row.operation == "Relu"]
    assert (gather.kind, gather.axes, gather.layer) == ("all-gather", ("model",), "block")
    assert gather.source == line_in(Gathering, "tf.nn.relu")
    assert gather.annotated_at == line_in(Gathering, '"BL_"') and gather.layout == "BL_"
    assert gather.before == "B over data, dimension 2 over model" and gather.after == "B over data"
    assert gather.bytes_per_step == 4 * 4 * 4 * 32


def test_activations_in_a_loop_are_found():
    rows, _ = found_in(Looping)
    (hidden,) = [row for row in rows if row.operations == ("Relu",)]
    assert hidden.chosen == "dimension 0 over data, dimension 2 over model"
    assert hidden.layer == "block" and np.prod(hidden.shape) == 8 * 4 * 32
