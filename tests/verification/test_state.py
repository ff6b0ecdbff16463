# tests: wings/verification/steps.py, wings/verification/experiment.py
"""Tests the parts of a state besides weights: averages, the loss scale, local updates."""

import pytest

import lingvo_gshard
from lingvo_gshard.sharding.partitioning import current_partitioning
from lingvo_gshard.wings.low_precision.loss_scale import LossScale
from lingvo_gshard.wings.optimizers.averages import Averages
from lingvo_gshard.wings.optimizers.local_updates import LocalUpdates
from tests.tiny import experiment_params

MESH, STRATEGY = "data=2,model=2", "B->data; H->model"


def verify(mesh=MESH, strategy=STRATEGY, partitioner="gspmd", **trainer):
    params = experiment_params()
    for path, value in trainer.items():
        params.step.set_path(path.replace("__", "."), value)
    return lingvo_gshard.verify(params, mesh=mesh, strategy=strategy, partitioner=partitioner)


def names(found, kind):
    return {row.name for row in found.compared if row.kind == kind}


def times_devices(x):
    """A mistake: what is computed over a mesh is a multiple."""
    return x * (1.0 + 0.01 * (current_partitioning().mesh.size - 1))


@pytest.mark.parametrize("partitioner", ["gspmd", "shardy"])
def test_averages_are_compared(partitioner):
    found = verify(average_decay=0.9, partitioner=partitioner)
    assert found.is_equal and not found.not_verified, found.lines()
    assert names(found, "average") == {
        f"averages.{layer}.{weight}" for layer in ("hidden", "output") for weight in "wb"
    }
    assert names(found, "counter") == {"step", "stopped"}


@pytest.mark.slow
def test_wrong_averages_are_found(monkeypatch):
    after = Averages.after
    monkeypatch.setattr(
        Averages, "after", lambda *arguments: after(*arguments).transform(times_devices)
    )
    found = verify(average_decay=0.9)
    assert found.first.kind == "average", found.lines()


@pytest.mark.slow
def test_the_scale_of_the_loss_is_compared(monkeypatch):
    found = verify(precision="float16", loss_scale__growth_interval=1)
    assert found.is_equal and not found.not_verified, found.lines()
    assert "loss_scale.scale" in names(found, "counter")
    assert any("step.precision = 'float32' instead of 'float16'" in n for n in found.notes)
    update = LossScale.update

    def wrong(self, state, finite):
        new = update(self, state, finite)
        return new.pack([new.good_steps, times_devices(new.scale), new.skipped_steps])

    monkeypatch.setattr(LossScale, "update", wrong)
    assert verify(precision="float16").first.name == "loss_scale.scale"


LOCAL = {
    "mesh": "worker=2,data=2",
    "strategy": "data",
    "local_updates__every": 3,
    "local_updates__learning_rate": 0.7,
    "local_updates__momentum": 0.9,
    "local_updates__nesterov": True,
}


@pytest.mark.slow
def test_the_outer_step_of_local_updates_is_compared():
    found = verify(**LOCAL)
    assert found.is_equal and not found.notes, found.lines()
    weights = {f"{layer}.{weight}" for layer in ("hidden", "output") for weight in "wb"}
    outer = names(found, "outer weight")
    assert {f"theta.{w}" for w in weights} | {f"workers.theta.{w}" for w in weights} <= outer
    assert len(outer) == 12 and any(name.startswith("outer.") for name in outer)


@pytest.mark.slow
def test_a_wrong_outer_step_is_found(monkeypatch):
    update = LocalUpdates.update

    def wrong(self, specs, theta, means, *rest):
        return update(self, specs, theta, means.transform(times_devices), *rest)

    monkeypatch.setattr(LocalUpdates, "update", wrong)
    found = verify(**LOCAL)
    assert found.first.kind == "outer weight", found.lines()


def test_workers_need_an_axis():
    with pytest.raises(ValueError, match="needs an axis worker"):
        verify(local_updates__every=3)
