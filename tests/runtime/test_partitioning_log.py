# tests: runtime/partitioning_log.py, wings/planning/program_reader.py
"""Tests reports on a run's partitioning and the partitioner's warnings."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.runtime import partitioning_log
from lingvo_gshard.sharding import annotate, xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.options import PARTITIONERS
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import Replicated
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.hlo import names
from lingvo_gshard.wings.hlo.names import FullReplication

CUBE = Mesh.parse("x=2,y=2,z=2")
# From columns over one axis to rows over the other two: XLA has to replicate the tensor.
BEFORE, AFTER = ((), ("z",)), (("x", "y"), ())


class Awkward(Layer):
    """A layer with a resharding that XLA can only do by full replication."""

    @layer_method
    def fprop(self, theta, x):
        return xla.tile(tf.cos(xla.tile(tf.sin(x), BEFORE, CUBE)), AFTER, CUBE)


def awkward(x):
    return Awkward(Awkward.params(), "encoder.layers[0].awkward").fprop(None, x)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_full_replication_warning_names_the_layer(partitioner, capfd):
    executable = partition(awkward, CUBE, partitioner=partitioner).compile(np.zeros((8, 8), "f4"))
    (found,) = executable.full_replications()
    assert found.operation == "encoder/layers_0/awkward/XlaSharding"
    # Devices [rows, columns, copies]: columns over 2, and then rows over 4.
    assert found.before.startswith("{devices=[1,2,4]") and found.after.startswith(
        "{devices=[4,1,2]"
    )
    warning = partitioning_log.describe_program(executable)[1]
    assert warning == (
        "Warning: encoder/layers_0/awkward/XlaSharding is replicated in full on every device to "
        f"reshard it from {found.before} to {found.after}"
    )
    # XLA's own warning is hidden.
    shown = capfd.readouterr().err
    assert names.WARNING_TEXT not in shown and "GSPMD" not in shown


def test_efficient_partitioning_has_no_warnings():
    partitioning = partition(lambda x: annotate(tf.sin(annotate(x, "BM")), "BM"), "data=8", "data")
    lines = partitioning_log.describe_program(partitioning.compile(np.zeros((2**14, 2**7), "f4")))
    assert lines == [
        "lambda: 2.0 MiB per device (arguments 1.0, temporaries 0.0); collectives: none"
    ]


def test_collectives_are_counted_by_kind():
    def function(x):
        total = tf.reduce_sum(annotate(x, "BM"), 0)
        return annotate(annotate(x, "BM") * total, "MB"), total

    lines = partitioning_log.describe_program(
        partition(function, "data=8", "data").compile(np.ones((8, 8), "f4"))
    )
    assert lines[0].endswith("collectives: 1 all-reduce, 1 all-to-all") and len(lines) == 1


def test_collectives_in_loops_are_also_counted_per_step():
    def function(x):
        def shuffle(x):
            return annotate(annotate(tf.sin(x), "MB"), "BM")

        _, y = tf.while_loop(lambda i, _: i < 5, lambda i, x: (i + 1, shuffle(x)), (0, x))
        return y

    lines = partitioning_log.describe_program(
        partition(function, "data=8", "data").compile(np.ones((8, 8), "f4"))
    )
    assert lines[0].endswith("collectives: 2 all-to-all (10 per step)")


def test_unused_axes_are_reported():
    partitioning = Partitioning.make("data=2,spare=4,one=1", "expert")
    assert partitioning_log.unused_axis_warnings(partitioning) == [
        "Warning: strategy expert splits nothing over axis spare: its 4 devices all do the "
        "same work"
    ]
    assert (
        partitioning_log.unused_axis_warnings(Partitioning.make("data=2,model=4", "expert_tensor"))
        == []
    )


def test_many_warnings_are_truncated(monkeypatch):
    rows = [FullReplication(f"layer_{n}/op", "{a}", "{b}") for n in range(7)]
    executable = partition(lambda x: x, "data=8").compile(np.zeros(8, "f4"))
    monkeypatch.setattr(type(executable), "full_replications", lambda self: rows)
    lines = partitioning_log.describe_program(executable)
    assert len(lines) == 7
    assert lines[5].startswith("Warning: layer_4/op is")
    assert lines[6] == "and 2 more tensors that are replicated to reshard them"


def test_large_tensors_that_are_not_split_are_reported():
    rows = [Replicated(f"w{n}", (8, n), (9 - n) * 2**18, f"reason {n}") for n in range(9)]
    assert partitioning_log.describe_unsplit(rows) == [
        *(f"Not split: w{n} [8, {n}], {(9 - n) / 4:.1f} MiB: reason {n}" for n in range(5)),
        "and 1 more tensors that are not split",
    ]
    assert partitioning_log.describe_unsplit(rows[6:]) == []
