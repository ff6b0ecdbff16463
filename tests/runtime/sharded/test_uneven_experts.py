# tests: sharding/partitioning.py, runtime/program/padding.py
"""Checks that experts that do not divide over the devices train as on one device."""

import pytest

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import weight_rows
from tests.runtime import tiny_translation

STEPS = 2


def losses(runtime: SingleDeviceRuntime | SpmdRuntime) -> list[float]:
    runtime.init_state()
    rows = [runtime.train_step(tiny_translation.batch(i)).read() for i in range(STEPS)]
    return [row[name] for row in rows for name in ("loss", "gradient_norm")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh", "split"),
    [
        ("expert", "data=8", "replicated"),
        ("expert_fsdp", "data=8", "M over data (8)"),
        ("expert_zero1", "data=8", "replicated"),
        ("expert_fsdp", "data=4,fsdp=2", "E over data (4), M over fsdp (2)"),
        ("expert_fsdp_tensor", "data=2,fsdp=2,model=2", "E over data (2), M over fsdp (2), H"),
    ],
)
def test_four_experts_train_as_on_one_device(strategy, mesh, split):
    trainer = tiny_translation.trainer(num_experts=4)
    partitioning = Partitioning.make(mesh, strategy)
    rows = weight_rows(trainer.theta_specs, partitioning)
    (row,) = [row for row in rows if row.path == "encoder.layers[1].feed_forward.experts.w_in"]
    assert row.split.startswith(split) and row.shape[0] == 4
    found = losses(SpmdRuntime(trainer, partitioning, devices_for(partitioning.mesh.size)))
    assert found == pytest.approx(losses(SingleDeviceRuntime(trainer)), rel=1e-4)
