# tests: wings/planning/programs/planned.py, wings/planning/planned_program.py
# tests: wings/saved_programs/program_file.py
"""Compares the plan of a saved training step with that of the trainer it was lowered from."""

import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.planning import planner
from lingvo_gshard.wings.planning.machines import topologies
from tests.runtime import tiny_translation


@pytest.mark.slow
def test_plan_of_a_saved_step_equals_that_of_its_trainer(tmp_path):
    trainer = tiny_translation.trainer()
    batch = {
        name: tf.TensorSpec(value.shape, value.dtype)
        for name, value in tiny_translation.batch(0).items()
    }
    partitioning = Partitioning.make("data=8", "expert")
    program, _ = train_program(trainer, partitioning, "gspmd", batch)
    path = tmp_path / "step.zip"
    program.save(path)
    found = lingvo_gshard.plan(path, "cpu:8", tokens=1e9)
    expected = planner.plan_step(trainer, batch, partitioning, topologies.get("cpu:8"), "step")
    for field in ("bytes_per_device", "flops", "mesh", "strategy", "partitioner"):
        assert getattr(found, field) == getattr(expected, field), field
    assert found.parameters.total == expected.parameters.total
    moved = [
        sorted((row.kind, row.axis, row.bytes, row.count) for row in plan.collectives)
        for plan in (found, expected)
    ]
    assert sum(r[2] * r[3] for r in moved[0]) == sum(r[2] * r[3] for r in moved[1])
    assert {row.layer for row in expected.tensors} == {row.layer for row in found.tensors}
    assert found.tokens_per_step == trainer.task.tokens(batch)
    with pytest.raises(ValueError, match="weights=theta. applies to what jax.export wrote"):
        lingvo_gshard.plan(path, "cpu:8", weights="theta")
    with pytest.raises(ValueError, match=r"step.zip was made for `mesh=data=8 "):
        lingvo_gshard.plan(path, "cpu:8", mesh="data=4,model=2")
    with pytest.raises(ValueError, match=r"step.zip was made for 8 devices, data=8, but"):
        lingvo_gshard.plan(path, "cpu:4")
