# tests: runtime/offloading.py, wings/optimizers/offload.py, wings/hlo/host_transfers.py
"""Compiles training steps with arrays in host memory for TPUs and GPUs, and reads their plans."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.optimizers import offload
from lingvo_gshard.wings.planning import planner
from lingvo_gshard.wings.planning.machines import compilers, cuda, topologies
from lingvo_gshard.wings.planning.operation_rows import HOST_TRANSFERS
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.repeat.loop import Repeat

pytestmark = pytest.mark.slow
needs_libtpu = pytest.mark.skipif(compilers.installed() is None, reason="libtpu is missing")
needs_cuda = pytest.mark.skipif(cuda.installed() is None, reason="XLA's GPU compiler is missing")
MACHINES = [
    pytest.param("v5p:2x2x1", marks=needs_libtpu),
    pytest.param("gpu:h100:1x4", marks=needs_cuda),
]
DEVICES, ROWS, LENGTH, LAYERS, M = 4, 4, 2048, 8, 1024


def trainer_of(policy="full", offload_moments=False) -> Trainer:
    """Returns a trainer of a small model like Llama."""
    task = LanguageModelTask.params().set(vocabulary_size=4096, model_dim=M, add_positions=False)
    decoder = task.decoder.set(num_layers=LAYERS, num_heads=8, hidden_dim=4 * M, moe_every=0)
    decoder.layer.feed_forward.set(activation="swiglu", use_bias=False)
    decoder.layer.self_attention.rotary_fraction = 1.0
    decoder.execution = Repeat.params().set(rematerialize=policy)
    step = Trainer.params().set(
        precision="bfloat16", optimizer=Adam.params(), offload_moments=offload_moments
    )
    return step.instantiate(task)


@functools.cache
def planned(machine: str, policy="full", offload_moments=False) -> Plan:
    names = ("target_inputs", "target_labels", "target_positions", "target_segments")
    batch = {name: tf.TensorSpec([ROWS, LENGTH], tf.int32) for name in names}
    partitioning = Partitioning.make(f"data={DEVICES}", "fsdp")
    trainer = trainer_of(policy, offload_moments)
    return planner.plan_step(trainer, batch, partitioning, topologies.get(machine), "step")


def moved(plan: Plan, to_host: bool) -> int:
    return sum(row.bytes for row in plan.host_transfers if row.to_host == to_host)


@pytest.mark.parametrize("machine", MACHINES)
def test_moments_leave_the_device_and_are_moved_once_a_step(machine):
    plain, hosted = planned(machine), planned(machine, offload_moments=True)
    specs = trainer_of().state_specs().moments.flatten()
    size = sum(4 * np.prod(s.shape) for s in specs if offload.is_offloaded(s)) / DEVICES
    memory = hosted.bytes_per_device
    assert memory.host == pytest.approx(size, rel=0.01)
    assert memory.moments < 0.01 * plain.bytes_per_device.moments
    # Layers are updated one after the other, so that few moments are on the device.
    assert plain.bytes_per_device.peak - memory.peak > 0.8 * size
    for to_host in (True, False):
        assert moved(hosted, to_host) == pytest.approx(size, rel=0.01)
    assert plain.host_transfers == [] and plain.bytes_per_device.host == 0


@pytest.mark.parametrize("machine", MACHINES)
def test_inputs_of_layers_leave_the_device_behind_computation(machine):
    plain, hosted = planned(machine), planned(machine, "full_offloaded")
    size = LAYERS * ROWS * LENGTH * M * 2 / DEVICES
    assert hosted.bytes_per_device.host == pytest.approx(size, rel=0.01)
    assert plain.bytes_per_device.peak - hosted.bytes_per_device.peak > 0.5 * size
    for to_host in (True, False):
        assert moved(hosted, to_host) == pytest.approx(size, rel=0.01)


@needs_libtpu
def test_a_plan_adds_what_the_step_waits_for():
    hosted = planned("v5p:2x2x1", offload_moments=True)
    rate = topologies.get("v5p:2x2x1").chip.host_bandwidth
    bound = sum(row.seconds_bound for row in hosted.host_transfers)
    assert bound == pytest.approx(sum(row.bytes for row in hosted.host_transfers) / rate)
    exposed = sum(row.seconds for row in hosted.host_transfers)
    hidden = sum(row.hidden_seconds for row in hosted.host_transfers)
    assert exposed + hidden == pytest.approx(bound)
    (kind,) = [row for row in hosted.kinds if row.kind == HOST_TRANSFERS]
    assert kind.seconds == pytest.approx(exposed)
    assert hosted.seconds_per_step > planned("v5p:2x2x1").seconds_per_step
    assert any("15 GB/s in each direction" in note for note in hosted.notes)
