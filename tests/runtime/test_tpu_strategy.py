"""Checks that the tpu_strategy runtime has the local losses and an annotated step."""

import json
import pathlib
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.runtime import tpu_strategy
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.tpu_strategy import TpuStrategyRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from tests import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPLIT = "B->data; H->data | weights: H->data"


@pytest.fixture
def trainer():
    params = tiny.experiment_params()
    return params.step.instantiate(params.task.instantiate(), params.run.steps)


@pytest.fixture
def local(trainer):
    runtime = SingleDeviceRuntime(trainer)
    runtime.init_state()
    return runtime


def one_device(trainer, mesh="data=1", **options):
    strategy = tf.distribute.OneDeviceStrategy("/device:CPU:0")
    return TpuStrategyRuntime(trainer, strategy, Partitioning.make(mesh, SPLIT), **options)


@pytest.mark.slow
# Annotations for eight devices stand in the step of one, and change nothing there.
@pytest.mark.parametrize("mesh", ["data=1", "data=8"])
def test_losses_equal_one_device_bit_for_bit(trainer, local, mesh):
    runtime = one_device(trainer, mesh)
    runtime.init_state()
    for index in range(5):
        batch = tiny.make_batch(1, index)
        assert runtime.train_step(batch).read() == local.train_step(batch).read()
    assert runtime.step == 5
    for mine, theirs in zip(runtime.state().flatten(), local.state().flatten(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    batch = tiny.make_batch(2, 0)
    assert runtime.eval_step(batch) == local.eval_step(batch)
    assert len(runtime.compilations) == 2


def test_resumes_from_the_state_of_one_device(trainer, local):
    local.train_step(tiny.make_batch(1, 0))
    runtime = one_device(trainer, "data=8")
    runtime.load_state(local.state())
    runtime.load_state(local.state())
    batch = tiny.make_batch(1, 1)
    assert runtime.train_step(batch).read() == local.train_step(batch).read()


def test_bound_functions_need_only_weights(trainer, local):
    theta = local.state().theta
    runtime = one_device(trainer, "data=8")
    runtime.load_theta(theta)
    function = runtime.bind_weights(lambda theta, ids: tf.gather(theta.output.b, ids) + 1.0)
    ids = np.array([[0, 3], [1, 1]], np.int32)
    np.testing.assert_array_equal(function(ids), theta.output.b[ids] + 1.0)
    np.testing.assert_array_equal(function(ids[:1]), theta.output.b[ids[:1]] + 1.0)


def test_replicated_tensors_are_reported(trainer):
    assert one_device(trainer, "data=8").pop_messages() == []  # too small to speak of
    with pytest.raises(ValueError, match=r"`max_replicated_mb=0`: (.|\n)*hidden\.w \[6, 8\], "):
        one_device(trainer, "data=8", max_replicated_megabytes=0.0)
    one_device(trainer, "data=1", max_replicated_megabytes=0.0)


def test_strategy_with_several_replicas_is_rejected(trainer):
    strategy = types.SimpleNamespace(num_replicas_in_sync=2)
    with pytest.raises(ValueError, match="has 2 replicas; one over all cores expected"):
        TpuStrategyRuntime(trainer, strategy, Partitioning.make("data=2", SPLIT))


def test_connecting_to_a_tpu_times_out(monkeypatch):
    answer = threading.Event()

    def wait(**_):
        answer.wait()
        raise RuntimeError("too late")

    monkeypatch.setattr(tpu_strategy, "_check_reachable", lambda _: None)
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", wait)
    with pytest.raises(ValueError, match="`tpu=grpc://192.0.2.1:8470`: no answer within 0 seconds"):
        tpu_strategy.connect("grpc://192.0.2.1:8470", wait_seconds=0.01)
    answer.set()


@pytest.mark.slow
def test_tpu_strategy_partitions_the_step_over_all_cores():
    """The real TPUStrategy traces the step, which a TPU would compile."""
    command = [sys.executable, "-m", "tests.runtime.tpu_cores_on_cpu"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["cores"] == found["cores_per_replica"] == 8
    assert found["replicas"] == 1
    assert found["spmd"]
    assert found["steps"] == 0
    assert found["devices"] == "8 CPU cores as data=8"
    variables = 2 + 3 * 4  # the step and whether it stopped; four weights with two moments each
    # Every variable enters as one of eight copies, the batch and what leaves as annotated.
    assert found["host"]["TPUPartitionedInputV2"] == variables
    assert found["host"]["XlaSharding"] == len(tiny.make_batch(1, 0)) + 1
    assert found["step"]["ReadVariableOp"] == found["step"]["AssignVariableOp"] == variables
    # Weights and moments before and after the step.
    assert found["step"]["XlaSharding"] >= 2 * 3 * 4
