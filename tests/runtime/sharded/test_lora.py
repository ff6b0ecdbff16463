# tests: wings/fine_tuning/adapters.py
"""Compares training of adapters over meshes with one device."""

import functools

import numpy as np
import pytest

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdOptions, SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Linear
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.fine_tuning.adapters import is_factor
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.repeat.loop import Repeat
from tests.training.lora_model import batch, task_params

STEPS, ROWS = 4, 8
EXECUTIONS = {"loop": Repeat.params(), "pipeline": Pipeline.params().set(stages=2)}


def make_trainer(execution):
    stack = {"num_heads": 4, "moe_every": 1}
    if execution:
        stack["execution"] = EXECUTIONS[execution]
    params = Trainer.params().set(
        clip_norm=1.0,
        optimizer=Adam.params(),
        schedule=Linear.params().set(learning_rate=0.02, warmup_steps=1, total_steps=40),
    )
    return params.instantiate(task_params(rank=2, **stack))


def steps(runtime):
    return [runtime.train_step(batch(ROWS)).read()["loss"] for _ in range(STEPS)]


@functools.cache
def trained_locally(execution):
    """Returns the initial state, the loss of each step, and the last state."""
    runtime = SingleDeviceRuntime(make_trainer(execution))
    runtime.init_state()
    state = runtime.state()
    return state, steps(runtime), runtime.state()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh", "execution"),
    [
        ("expert", "data=4", ""),
        ("expert_tensor", "data=2,model=2", "loop"),
        ("expert_fsdp_tensor", "data=2,fsdp=2,model=2", ""),
        ("fsdp", "data=4", "loop"),
        ("zero1", "data=4", ""),
        ("data_pipeline", "stage=2,data=2", "pipeline"),
    ],
)
def test_trains_as_on_one_device(strategy, mesh, execution):
    state, losses, last = trained_locally(execution)
    assert losses[0] - losses[-1] > 0.01
    partitioning = Partitioning.make(mesh, strategy)
    trainer = make_trainer(execution)
    devices = devices_for(partitioning.mesh.size)
    runtime = SpmdRuntime(trainer, partitioning, devices, SpmdOptions())
    runtime.load_state(state)
    np.testing.assert_allclose(steps(runtime), losses, rtol=1e-4)
    found, specs = runtime.state(), dict(trainer.theta_specs.flatten_items())
    before, expected = (dict(s.theta.flatten_items()) for s in (state, last))
    for path, array in found.theta.flatten_items():
        if not is_factor(path):
            np.testing.assert_array_equal(array, before[path])
            continue
        np.testing.assert_allclose(array, expected[path], rtol=2e-3, atol=2e-4, err_msg=path)
        split = partitioning.spec_storage_split(specs[path])
        parts = [partitioning.parts(axes) for axes in split]
        shape = tuple(np.array(array.shape) // parts)
        assert {shard.data.shape for shard in array.addressable_shards} == {shape}, path
    assert found.moments.flatten()
    assert all(".lora." in path for path, _ in found.moments.flatten_items())
