# tests: sharding/partitioning.py, runtime/program/padding.py
"""Checks that experts that do not divide over the devices train as on one device."""

import pytest

from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import weight_rows
from tests.runtime import tiny_translation, trainings

STEPS = 2


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
    rows = weight_rows(trainer.theta_specs, Partitioning.make(mesh, strategy))
    (row,) = [row for row in rows if row.path == "encoder.layers[1].feed_forward.experts.w_in"]
    assert row.split.startswith(split) and row.shape[0] == 4
    found = trainings.train(trainings.on_mesh(trainer, mesh, strategy), STEPS)
    expected = trainings.train(trainings.on_one_device(trainer), STEPS)
    trainings.assert_same_metrics(found, expected, 1e-4, ("loss", "gradient_norm"))
