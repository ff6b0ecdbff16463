# tests: tools/flags/run.py, api/backend.py
"""Tests the flags of the tpu_strategy runtime, including contradictions."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.api.backend import Backend
from lingvo_gshard.runtime import tpu_strategy
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.tools import train
from lingvo_gshard.tools.flags.run import runtime_options
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from tests import tiny
from tests.tools.train import tiny_train  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[3]


def launch(*flags):
    values = train.define_flags()
    values(["gshard-train", *flags])
    return Backend(runtime_options(values), tiny.experiment_params())


@pytest.fixture
def connected(monkeypatch):
    """Replaces the TPU by the CPU as a single core; returns the names of connected TPUs."""
    asked = []

    def connect(tpu):
        asked.append(tpu)
        return tf.distribute.OneDeviceStrategy("/device:CPU:0"), 1

    monkeypatch.setattr(tpu_strategy, "connect", connect)
    return asked


def tiny_trainer():
    params = tiny.experiment_params()
    return params.step.instantiate(params.task.instantiate(), params.run.steps)


def test_the_default_mesh_has_all_cores_along_data(connected):
    found = launch("--runtime=tpu_strategy", "--tpu=local")
    assert connected == ["local"]
    assert str(found.partitioning.mesh) == "data=1"
    assert found.partitioning.strategy.name == "expert"
    runtime = found.make_runtime(tiny_trainer())
    expected = SingleDeviceRuntime(tiny_trainer())
    for each in (runtime, expected):
        each.init_state()
    batch = tiny.make_batch(1, 0)
    assert runtime.train_step(batch).read() == expected.train_step(batch).read()


def test_flags_choose_mesh_and_strategy(connected):
    flags = "--runtime=tpu_strategy --tpu=grpc://10.0.0.2:8470 --mesh=data=1,model=1".split()
    found = launch(*flags, "--strategy=tensor")
    assert connected == ["grpc://10.0.0.2:8470"]
    assert (str(found.partitioning.mesh), found.partitioning.strategy.name) == (
        "data=1,model=1",
        "tensor",
    )


def test_mesh_with_too_many_cores_is_rejected(connected):
    with pytest.raises(ValueError, match="`mesh=data=4` needs 4 devices .* but there are 1"):
        launch("--runtime=tpu_strategy", "--tpu=local", "--mesh=data=4")


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--runtime=tpu_strategy", "`runtime=tpu_strategy` needs `tpu`, such as `tpu=local`"),
        ("--tpu=local", "`tpu=local` needs `runtime=tpu_strategy`; the local runtime has"),
        ("--tpu=local --mesh=data=8", "`tpu=local` needs `runtime=tpu_strategy`; the spmd runtime"),
        (
            "--runtime=tpu_strategy --tpu=local --partitioner=shardy",
            "`partitioner=shardy` needs `runtime=spmd`; under tpu_strategy TensorFlow",
        ),
        (
            "--runtime=tpu_strategy --tpu=local --device_order=topology",
            "`device_order=topology` needs `runtime=spmd`; under tpu_strategy TensorFlow",
        ),
        ("--runtime=tpu_strateg --tpu=local", "`runtime=tpu_strateg` is unknown. .*tpu_strategy"),
        ("--runtime=tpu_strategy --tpu=local --mesh=data", "`mesh=data`"),
    ],
)
def test_contradicting_flags_are_rejected(connected, flags, message):
    with pytest.raises(ValueError, match=message):
        launch(*flags.split())
    assert connected == []


def test_run_equals_that_of_the_local_runtime(connected, tmp_path):
    weights = []
    for name, flags in (("local", []), ("tpu", ["--runtime=tpu_strategy", "--tpu=local"])):
        logdir = tmp_path / name
        flags = ["--experiment=test.tiny", f"--logdir={logdir}", "--steps=6", *flags]
        assert train.main(["gshard-train", *flags]) == 0
        store = CheckpointStore(logdir / "checkpoints", writable=False)
        weights.append(store.restore().theta)
        store.close()
    assert weights[0].keys() == weights[1].keys()
    for path, expected in weights[0].items():
        np.testing.assert_array_equal(weights[1][path], expected, err_msg=path)


@pytest.mark.slow
def test_missing_tpu_is_reported(tmp_path):
    flags = ["--runtime=tpu_strategy", "--tpu=local", f"--logdir={tmp_path}/run"]
    command = [
        sys.executable,
        "-m",
        "tests.tools.train.tiny_train",
        "--experiment=test.tiny",
        *flags,
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("gshard-train: ")]
    assert error.startswith(
        f"gshard-train: error: --tpu=local: TensorFlow {tf.__version__} reaches no TPU: "
    )
    assert "docs/accelerators.md" in error
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()
