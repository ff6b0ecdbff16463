# tests: wings/planning/machines/cuda.py, wings/planning/machines/gpu_targets.py
"""The compiler for GPUs: its version, its targets, and programs compiled for hosts of GPUs."""

import pathlib
import shlex
import subprocess
import sys

import msgspec
import pytest

from docs.planned.published import decoders
from lingvo_gshard.wings.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.wings.planning.machines import chips, compilers, cuda, gpu_targets, topologies
from lingvo_gshard.wings.planning.plan.plan import Plan

ROOT = pathlib.Path(__file__).resolve().parents[3]

GPUS = [key for key, chip in chips.CHIPS.items() if chip.kind == "gpu"]

# Two products with a collective between them: rows over hosts, columns over a host's GPUs.
PROGRAM = """
import sys
import tensorflow as tf
import lingvo_gshard

def feed_forward(x_BM, w_MH, w_HM):
    return tf.matmul(tf.matmul(x_BM, w_MH), w_HM)

plan = lingvo_gshard.plan(
    feed_forward,
    [tf.TensorSpec((256, 512)), tf.TensorSpec((512, 1024)), tf.TensorSpec((1024, 512))],
    sys.argv[1],
    mesh=sys.argv[2],
    strategy="data_tensor",
    layouts=["BM", "weights:MH", "weights:HM"],
)
print(plan.to_json())
"""


@pytest.mark.parametrize("key", GPUS)
def test_every_gpu_has_a_target(key):
    chip = chips.get(key)
    text = gpu_targets.description(chip.target, chip.memory_bytes, chip.memory_bandwidth)
    assert f"device_memory_size: {chip.memory_bytes}" in text
    # A description by itself gives the published rate of the float32 units, within 5%.
    fields = dict(line.split(": ") for line in text.splitlines() if line.count(": ") == 1)
    fields = {name.strip(): value for name, value in fields.items()}
    cores = int(fields["core_count"]) * int(fields["fpus_per_core"])
    rate = 2e9 * float(fields["clock_rate_ghz"]) * cores
    assert chip.vector_flops == pytest.approx(rate, rel=0.05)


def test_a_plugin_of_another_version_is_refused(monkeypatch):
    versions = {"jax": "0.10.2", "jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.9.0"}
    monkeypatch.setattr(cuda.importlib.metadata, "version", versions.__getitem__)
    expected = r"jax-cuda12-pjrt 0.9.0 is installed, but jax 0.10.2 requires .*==0.10.2; install"
    with pytest.raises(ValueError, match=expected):
        cuda.check_version()


def test_without_the_compiler_the_one_for_cpus_is_used(monkeypatch):
    monkeypatch.setattr(cuda, "installed", lambda: None)
    topology = topologies.get("gpu:h100:1x8")
    assert topology.compiler == "cpu" and not topology.compiler_options
    for text in (topology.notes[0], topology.compiler_choice, *compilers.listing()[1:]):
        assert cuda.MISSING in text and cuda.INSTALL in text


def test_install_command_installs_the_tested_version():
    *_, first, second = shlex.split(cuda.INSTALL)
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert {first, second} <= set(constraints)
    assert f'"plan-gpu": ["{second}", "{first}"]' in (ROOT / "setup.py").read_text()


def test_operations_that_are_computed_again_are_noted():
    assert cuda.recomputation_notes({"dot.1": 1.0, "fusion.2": 3.0}) == []
    seconds = {"dot.1": 1.0, "dot.1.remat": 1.0, "fusion.2.remat4": 0.5, "fusion.2": 1.5}
    (note,) = cuda.recomputation_notes(seconds)
    assert note.startswith("the compiler computes 2 operations again, 38% of the step")
    assert "XLA_FLAGS=--xla_gpu_memory_limit_slop_factor=200" in note


def test_steps_that_wait_for_the_network_are_told_how_to_schedule_in_another_way():
    (note,) = cuda.schedule_notes(0.2, {})
    flag = "XLA_FLAGS=--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=400"
    assert note.startswith("the step waits for communication for 20% of its time") and flag in note
    assert cuda.schedule_notes(0.05, {}) == []
    assert cuda.schedule_notes(0.2, {"XLA_FLAGS": flag.partition("=")[2]}) == []


@pytest.mark.slow
@pytest.mark.skipif(cuda.installed() is None, reason=cuda.MISSING)
@pytest.mark.parametrize("key", GPUS)
def test_a_sharded_program_is_compiled_for_hosts_of_gpus(key):
    command = [sys.executable, "-c", PROGRAM, f"gpu:{key}:16x8", "data=16,model=8"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    plan = msgspec.json.decode(result.stdout, type=Plan)
    assert plan.compiler == "gpu" and plan.devices == 128
    assert plan.flops.executed == 2 * 2 * 256 * 512 * 1024 // 128
    assert plan.bytes_per_device.weights == 2 * 4 * 512 * 1024 // 8
    (row,) = plan.collectives
    assert (row.kind, row.axis, row.count) == ("all-reduce", "model", 1)
    assert row.bytes == 4 * 256 // 16 * 512


@pytest.mark.slow
@pytest.mark.skipif(cuda.installed() is None, reason=cuda.MISSING)
def test_a_step_whose_tiles_triton_cannot_compile_is_planned():
    settings = ["input.batch_rows = 8", 'task.decoder.execution.rematerialize = "products"']
    decoder = decoders.megatron(2, 4096, 32, vocabulary=512, is_tied=True)
    params = decoder.experiment(4096, settings)
    params.set_path("step.precision", "float32")
    options = PlanOptions(mesh="data=8", strategy="data")
    plan = plan_experiment(params, topologies.get("gpu:h100:1x8"), options)
    # Autotuning, which needs a GPU, takes other tiles in a training.
    assert not plan.has_code
    assert plan.flops.executed > 0.9 * plan.flops.useful
