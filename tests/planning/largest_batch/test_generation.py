# tests: wings/planning/generation.py, wings/planning/largest_batch.py
"""The largest batch of a small model, by compiled programs, compared with a linear search."""

import dataclasses

import pytest

import lingvo_gshard
from lingvo_gshard.wings.planning.experiments import PlanOptions
from lingvo_gshard.wings.planning.generation import GenerationOptions, plan_generation
from lingvo_gshard.wings.planning.largest_batch import plan_largest_batch
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology

OPTIONS = PlanOptions(mesh="data=2", strategy="expert")
ASKED = GenerationOptions(has_prefill=False)
KIB = 2**10


def experiment():
    return lingvo_gshard.experiment(
        "language_model.quickstart",
        ["task.model_dim = 16", "task.decoder.num_layers = 1", "task.decoder.moe_every = 0"],
    )


def machine(usable_bytes: int) -> Topology:
    topology = topologies.get("cpu:2")
    chip = dataclasses.replace(topology.chip, usable_bytes=usable_bytes)
    return dataclasses.replace(topology, chip=chip)


@pytest.mark.slow
def test_result_is_that_of_a_linear_search(monkeypatch):
    # A tiny model takes most memory while it is loaded, whatever the batch.
    monkeypatch.setattr("lingvo_gshard.wings.planning.generation.peak_bytes", lambda _: 0)
    plans = {
        batch: plan_generation(
            experiment(), machine(2**40), OPTIONS, dataclasses.replace(ASKED, batch=batch)
        )
        for batch in (2, 4, 6, 8)
    }
    peaks = {batch: plan.step.bytes_per_device.peak for batch, plan in plans.items()}
    for batch, following in ((2, 4), (4, 6), (6, 8)):
        # Any limit from this peak to the next one has the same answer.
        for limit in (peaks[batch], peaks[following] - 1):
            found = plan_largest_batch(experiment(), machine(limit), OPTIONS, ASKED)
            assert (found.batch, found.next_batch) == (batch, following)
            assert found.granule == 2 and found.plan.fits
            assert found.plan.step.bytes_per_device.peak == peaks[batch]
            assert found.plan.step.tokens_per_second == plans[batch].step.tokens_per_second
            assert found.plan.generated == plans[batch].generated
    found = plan_largest_batch(experiment(), machine(10 * KIB), OPTIONS, ASKED)
    assert found.batch == 0 and [trial.batch for trial in found.trials] == [2, 1]


@pytest.mark.slow
def test_python_api_takes_a_batch_or_searches_one():
    plan = lingvo_gshard.plan_generation(experiment(), "cpu:2", 4, mesh="data=2")
    assert plan.batch == 4 and plan.prefill


def test_another_word_as_the_batch_is_refused():
    with pytest.raises(ValueError, match="batch=all`: expected a number of texts, or 'largest'"):
        lingvo_gshard.plan_generation(experiment(), "cpu:2", "all")
