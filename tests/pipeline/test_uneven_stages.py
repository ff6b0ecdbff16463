# tests: wings/pipeline/pipeline.py
"""Trains layers that do not divide into stages, on a mesh, and compares with one device."""

import numpy as np
import pytest

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Linear
from lingvo_gshard.training.step.trainer import Trainer
from tests.layers.stacks.executions import pipeline, sequential

V, B, L = 11, 8, 6


def losses(runtime) -> list[float]:
    numbers = np.random.default_rng(0)
    inputs, labels = numbers.integers(0, V, (2, B, L), np.int32)
    batch = {
        "target_inputs": inputs,
        "target_labels": labels,
        "target_segments": np.ones((B, L), np.int32),
        "target_positions": np.tile(np.arange(L, dtype=np.int32), (B, 1)),
    }
    runtime.init_state()
    return [runtime.train_step(batch).read()["loss"] for _ in range(3)]


def trainer(execution, **values) -> Trainer:
    task = LanguageModelTask.params().set(vocabulary_size=V, model_dim=8)
    task.decoder.set(num_layers=3, num_heads=2, hidden_dim=12, moe_every=0, execution=execution)
    schedule = Linear.params().set(learning_rate=0.02, warmup_steps=0)
    step = Trainer.params().set(optimizer=Adam.params(), schedule=schedule, **values)
    return step.instantiate(task)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh", "values"),
    [
        ("data_pipeline", "stage=2,data=2", {}),
        ("pipeline_zero1", "data=2,stage=2", {"micro_batches": 2}),
    ],
)
def test_a_mesh_with_stages_trains_as_layers_one_by_one_on_one_device(strategy, mesh, values):
    expected = losses(SingleDeviceRuntime(trainer(sequential())))
    partitioning = Partitioning.make(mesh, strategy)
    devices = devices_for(partitioning.mesh.size)
    found = losses(SpmdRuntime(trainer(pipeline(2), **values), partitioning, devices))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert found[-1] < found[0] - 0.1
