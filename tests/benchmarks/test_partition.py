# tests: /benchmarks/partition.py
"""Runs the benchmark of partitioning at tiny sizes."""

import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import partition
from benchmarks.partition import PartitionTiming
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tools.benchmarks.step import StepCase
from tests import tiny
from tests.benchmarks.running import run
from tests.told import Told

NAMES = ["without annotations", "spmd, data=1", "local, 1 CPU"]


def tiny_trainer():
    params = tiny.experiment_params()
    return params.step.instantiate(params.task.instantiate(), params.run.steps)


def test_unpartitioned_reference_computes_the_trainers_steps():
    trainer = tiny_trainer()
    local, unannotated = SingleDeviceRuntime(trainer), partition.Unannotated(trainer)
    for runtime in (local, unannotated):
        runtime.init_state()
    for index in range(3):
        batch = tiny.make_batch(1, index)
        expected = local.train_step(batch).read()
        found = dict(zip(expected, unannotated.train_step(batch)(), strict=True))
        # One of the 16 rows may be a tie that rounding decides.
        assert found.pop("accuracy") == pytest.approx(expected.pop("accuracy"), abs=1 / 16)
        np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def test_annotations_in_the_reference_step_are_detected():
    trainer, batch = tiny_trainer(), tiny.make_batch(1, 0)
    specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in batch.items()}
    for mesh, annotated in (("data=1", False), ("data=2", True)):
        partitioning = Partitioning.make(mesh, "fsdp")
        program, _ = train_program(trainer, partitioning, "gspmd", specs)
        assert (partition._ANNOTATION in program.module) == annotated


def test_partition_compares_the_fastest_steps():
    """The clock gives three first steps, then two rounds of three."""
    clock = iter([5.0, 6.0, 7.0, 2.0, 3.0, 9.0, 4.0, 2.5, 8.0])
    told = Told()
    case = StepCase("tiny", tiny_trainer(), tiny.make_batch(1, 0), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "pipelined_seconds", lambda step, count: next(clock))
        rows = partition.measure(case, 2, told)
    assert rows == [
        PartitionTiming(NAMES[0], 2.0, 1.0, 5.0),
        PartitionTiming(NAMES[1], 2.5, 1.25, 6.0),
        PartitionTiming(NAMES[2], 8.0, 4.0, 7.0),
    ]
    assert told.stages[:3] == [f"compiling {name}" for name in NAMES]
    assert told.stages[3:] == ["measuring, 1 of 2", "measuring, 2 of 2"]


def test_partition_measures_an_experiment_and_writes_json(capsys, monkeypatch, tmp_path):
    def measure(case, repeats, report):
        assert case.name == "translation.quickstart, experts" and repeats == 3
        return [PartitionTiming(NAMES[0], 2.0, 1.0, 5.0), PartitionTiming(NAMES[1], 2.1, 1.05, 6.0)]

    monkeypatch.setattr(partition, "measure", measure)
    path = tmp_path / "partition.json"
    code, out, err = run(capsys, "partition", "--repeats=3", f"--json={path}")
    assert code == 0, err
    assert "spmd, data=1" in out and "1.050" in out
    rows = json.loads(path.read_text())["rows"]
    assert rows[1] == {"name": NAMES[1], "seconds": 2.1, "ratio": 1.05, "compile_seconds": 6.0}
    code, out, err = run(capsys, "partition", "--repeats=3", "--json")
    assert json.loads(out)["rows"] == rows and "1.050" in err


def test_mistyped_experiment_name_is_rejected(capsys):
    code, _, err = run(capsys, "partiton")
    assert code == 1 and "Did you mean 'partition'?" in err
