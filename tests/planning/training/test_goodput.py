# tests: wings/planning/training/goodput.py, wings/planning/training/job.py
"""Checks plans of whole trainings: published rates, units, sensitivities and mistakes."""

import dataclasses

import msgspec
import pytest

from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.training import formulas
from lingvo_gshard.wings.planning.training.goodput import plan_training
from lingvo_gshard.wings.planning.training.job import JobOptions, make_job
from tests.planning import example_plan

OPTIONS = JobOptions(tokens=1e13, simulated_runs=300)


def plan(topology="v3:16x16", **changes):
    """Returns the example's plan on a topology."""
    return example_plan.as_plan(example_plan.example_plan() | {"topology": topology} | changes)


def test_units_of_a_job_are_those_of_its_plan():
    record = example_plan.example_plan()
    job = make_job(plan(), dataclasses.replace(OPTIONS, failures="5e4"))
    assert job.state_bytes == sum(row["bytes"] for row in record["tensors"])
    assert job.costs.between_failures == pytest.approx(5e4 * 3600 / 256)
    assert job.steps == -(-1e13 // 2**20)
    assert job.costs.write == pytest.approx(job.state_bytes / (2e12 / 2048) / 64)
    assert job.costs.restart == pytest.approx(600 + 21.4 + job.costs.write)
    assert job.price(3600) == pytest.approx(256 * 2.0)


def test_llama3_rate_on_its_machine_gives_its_interruptions_and_effective_time():
    """54 days on 16,384 H100: 419 interruptions, more than 90% of the time effective."""
    step = 54 * 86_400 * 0.94 / 1_000
    whole = plan("gpu:h100:2048x8", seconds_per_step=step / 100, tokens_per_step=1_000_000)
    found = plan_training(whole, JobOptions(tokens=1e11, failures="llama3", simulated_runs=500))
    assert found.days.mean == pytest.approx(54, rel=0.01)
    assert found.failures.mean == pytest.approx(419, rel=0.01)
    assert 0.9 < found.goodput.mean < 0.96


def test_simulation_equals_the_closed_formula():
    whole = plan("gpu:h100:512x8")
    found = plan_training(whole, dataclasses.replace(OPTIONS, failures="1e4"))
    assert found.goodput.mean == pytest.approx(found.formula_goodput, rel=0.01)
    assert found.days.low < found.days.median < found.days.high
    shares = found.saving_share + found.lost_share + found.restarting_share
    assert shares + found.goodput.mean == pytest.approx(1)
    assert found.price and found.price.mean == pytest.approx(
        found.days.mean * 24 * 4096 * 98.32 / 8
    )


def test_agents_restore_snapshots_from_the_memory_of_hosts():
    whole = plan("gpu:h100:256x8")
    memory = whole.bytes_per_device
    job = make_job(whole, dataclasses.replace(OPTIONS, agents=True))
    copy = (memory.weights + memory.moments) / 10e9
    assert job.costs.restart == pytest.approx(45 + 60 + copy)
    assert job.costs.write == pytest.approx(job.state_bytes / 256 / 10e9)
    given = dataclasses.replace(OPTIONS, agents=True, restart=9, compile_seconds=1)
    assert make_job(whole, given).costs.restart == pytest.approx(10 + copy)


def test_both_recoveries_stand_side_by_side():
    whole = plan("gpu:h100:256x8")
    found = {
        agents: plan_training(whole, dataclasses.replace(OPTIONS, agents=agents))
        for agents in (False, True)
    }
    for agents, goodput in found.items():
        by_hand, by_agents = goodput.recoveries
        assert by_agents.goodput > by_hand.goodput
        assert goodput.recoveries[agents].goodput == pytest.approx(
            goodput.formula_goodput, rel=1e-3
        )
    assert found[True].goodput.mean > found[False].goodput.mean


def test_sensitivities_begin_with_the_largest_effect():
    found = plan_training(plan("gpu:h100:2048x8"), OPTIONS)
    assert {row.flag for row in found.sensitivities[:4]} == {"failures", "restart"}
    names = [row.change for row in found.published_rates]
    assert names == list(formulas.RATES)
    rates = {row.change: row for row in found.published_rates}
    assert rates["opt"].goodput < rates["llama3"].goodput < rates["tpu_v4"].goodput
    assert (rates["opt"].days or 0) > (rates["llama3"].days or 0)


def test_a_given_interval_and_stall_are_used():
    options = dataclasses.replace(OPTIONS, checkpoint_interval=600.0, checkpoint_stall=7.0)
    found = plan_training(plan(), options)
    assert found.interval == pytest.approx(600, abs=0.2) and found.stall == 7.0
    (row,) = (row for row in found.assumptions if row.flag == "checkpoint_stall")
    assert row.source == "`checkpoint_stall`"


def test_a_plan_with_its_training_is_read_back():
    whole = msgspec.structs.replace(plan(), goodput=plan_training(plan(), OPTIONS))
    assert msgspec.json.decode(whole.to_json(), type=Plan) == whole


def test_machines_without_a_price_have_none():
    found = plan_training(plan("tpu7x:4x4x4"), OPTIONS)
    assert found.price is None and found.published_rates[0].price is None


def test_rates_are_those_of_similar_chips():
    names = [
        formulas.default(topologies.get(name)).name
        for name in ("v5p:4x4x4", "gpu:a100:2x8", "gpu:h200:2x8", "cpu:4")
    ]
    assert names == ["tpu_v4", "rsc1", "llama3", "llama3"]
    # Kokolis et al. project 1.8 h for 16,384 GPUs, The Llama 3 paper counts about 3.1 h.
    assert formulas.RATES["rsc1"].chip_hours / 16_384 == pytest.approx(1.8, rel=0.01)
    assert formulas.RATES["llama3"].chip_hours / 16_384 == pytest.approx(3.1, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failures": "lama3"}, "`failures=lama3`: neither a published rate nor .*'llama3'"),
        ({"failures": "-3"}, "`failures=-3`: expected more than 0 chip-hours"),
        ({"failures": "nan"}, "`failures=nan`: expected more than 0 chip-hours"),
        ({"tokens": 0.0}, "`tokens=0.0`: expected more than 0"),
        ({"checkpoint_rate": 0.0}, "`checkpoint_rate=0.0`: .*0 was expected"),
        ({"checkpoint_rate": -1.0}, "`checkpoint_rate=-1.0`: .*0 was expected"),
        ({"checkpoint_interval": 0.0}, "`checkpoint_interval=0.0`: .*0 was expected"),
        ({"restart": -1.0}, "`restart=-1.0`: .*0 or more was expected"),
        ({"simulated_runs": 0}, "`simulated_runs=0`: .*1"),
        ({"simulated_runs": 10**9}, "`simulated_runs=1000000000`: .*1,?000,?000"),
        ({"tokens": 1e30}, "of `tokens=1e\\+30` have .* failures each; expected at most 1e\\+09"),
        ({"failures": "0.1"}, "256 chips fail every 1.41 s on average.*Expected at least 1%"),
    ],
)
def test_options_out_of_range_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        plan_training(plan(), dataclasses.replace(OPTIONS, **changes))


def test_a_plan_without_tokens_is_refused():
    with pytest.raises(ValueError, match="has no tokens of a step"):
        make_job(plan(tokens_per_step=None), OPTIONS)
