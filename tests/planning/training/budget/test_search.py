"""Checks what a budget buys: accounts, limits, sensitivities and mistakes."""

import dataclasses

import numpy as np
import pytest

from lingvo_gshard.wings.planning.machines import chips, topologies
from lingvo_gshard.wings.planning.training import formulas
from lingvo_gshard.wings.planning.training.budget.laws import Experts
from lingvo_gshard.wings.planning.training.budget.search import (
    STATE_SHARE,
    BudgetOptions,
    goodputs,
    named_machines,
    plan_budget,
    priced_machines,
    rate,
)
from lingvo_gshard.wings.planning.training.formulas import Interruptions

MACHINES = named_machines("gpu:h100:16x8,gpu:h100:128x8,v5e:8x8,v5p:8x8x8")
OPTIONS = BudgetOptions(3e5)


@pytest.fixture(scope="module")
def found():
    """Returns the plan of a budget."""
    return plan_budget(OPTIONS, MACHINES)


def test_money_time_and_arithmetic_of_a_choice_add_up(found):
    for row in [*found.machines, *found.experts, *found.sizes]:
        topology = topologies.get(row.topology)
        hours = row.days * 24 * topology.chips
        assert row.price == pytest.approx(hours * topology.chip.price.amount)
        assert row.price <= OPTIONS.budget * (1 + 1e-9) and row.days <= OPTIONS.days * (1 + 1e-9)
        mfu = OPTIONS.dense_mfu if row.expansion == 1 else OPTIONS.sparse_mfu
        peak = topology.chip.peak("bfloat16") * topology.devices
        assert row.flops == pytest.approx(row.days * 86_400 * row.goodput * mfu * peak)
        assert row.flops >= 6 * row.active * row.tokens
        memory = STATE_SHARE * topology.chip.usable_bytes * topology.devices
        assert row.total * OPTIONS.state_bytes <= memory
    best = min(row.loss for row in found.machines)
    assert found.best.loss == best == found.machines[0].loss == found.experts[0].loss


def test_the_best_is_what_trying_each_model_finds(found):
    rated = [
        rate(machine, Experts(2**power), OPTIONS) for machine in MACHINES for power in range(6)
    ]
    assert found.best.loss == min(float(each.loss.min()) for each in rated)
    assert {row.experts for row in found.experts} == {str(Experts(2**power)) for power in range(6)}
    assert [row.topology.split(":")[-2] for row in found.machines].count("h100") == 1


def test_sensitivities_begin_with_the_largest_and_name_what_they_decide(found):
    changes = [abs(row.loss_change) for row in found.sensitivities if row.loss_change is not None]
    assert changes == sorted(changes, reverse=True)
    rows = {row.change: row for row in found.sensitivities}
    assert rows["half the budget"].loss_change > 0 > rows["twice the budget"].loss_change
    assert rows["the law routed"].loss_change is None
    for row in found.sensitivities:
        is_other = row.choice.topology.split(":")[0] != found.best.topology.split(":")[0]
        assert not is_other or "machine" in row.decides
        assert ("experts" in row.decides) == (row.choice.experts != found.best.experts)


def test_limits_that_are_met_are_noted():
    few = plan_budget(dataclasses.replace(OPTIONS, tokens=1e11), MACHINES)
    assert few.best.tokens == 1e11 and "`tokens=1e+11` limits the training" in few.notes
    short = plan_budget(dataclasses.replace(OPTIONS, days=0.5), MACHINES)
    assert "`days=0.5` limits the training" in short.notes
    assert any(note.startswith("only ") for note in short.notes)
    small = plan_budget(OPTIONS, named_machines("v5e:2x4"))
    assert "the memory of v5e:2x4 limits the size of the model" in small.notes
    for budget, which in ((1.0, "smallest"), (1e13, "largest")):
        options = BudgetOptions(budget, days=1e6, state_bytes=0.01)
        end = plan_budget(options, named_machines("gpu:h100:4096x8"))
        assert any(f"the {which} model that is searched" in note for note in end.notes)


def test_goodput_of_arrays_equals_the_scalar_formulas():
    stall, write = np.array([0.1, 5.0, 60.0, 900.0]), np.array([1.0, 400.0, 0.0, 5_000.0])
    found = goodputs(10_000.0, stall, write, 600 + write)
    for index in range(4):
        costs = Interruptions(10_000.0, stall[index], write[index], 600 + write[index])
        interval = max(formulas.daly_interval(costs), write[index] - stall[index])
        expected = formulas.expected_goodput(costs, interval)
        assert found[index] == pytest.approx(expected)


def test_machines_are_those_with_a_price_and_within_a_pod():
    found = priced_machines()
    assert all(machine.chip.price and machine.kind in ("tpu", "gpu") for machine in found)
    names = [machine.name for machine in found]
    assert len(set(names)) == len(names)
    assert "v5e:16x16" in names and "v5e:16x32" not in names and "v4:16x16x16" in names
    assert "gpu:h100:1x8" in names and not any("l40s" in name for name in names)
    assert all(machine.chip.key in chips.CHIPS for machine in found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 0.0}, "`budget=0`: expected more than 0, such as 1e6 USD"),
        ({"budget": -5.0}, "`budget=-5`: expected more than 0"),
        ({"budget": float("nan")}, "`budget=nan`: expected more than 0"),
        ({"days": 0.0}, "`days=0`: expected more than 0"),
        ({"tokens": -1.0}, "`tokens=-1`: expected more than 0"),
        ({"dense_mfu": 1.5}, "`mfu=1.5`: expected more than 0 and at most 1"),
        ({"state_bytes": 0.0}, "`state_bytes=0`: expected more than 0"),
        ({"failures": "lama3"}, "`failures=lama3`: .*'llama3'"),
        ({"law": "joined"}, "`law=joined`: unknown scaling law"),
        ({"restart": -1.0}, "`restart=-1`: expected seconds"),
        ({"failures": "1e-3"}, "no machine of 4 can train even the smallest model"),
    ],
)
def test_options_out_of_range_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        plan_budget(dataclasses.replace(OPTIONS, **changes), MACHINES)


def test_a_machine_without_a_price_is_refused():
    with pytest.raises(ValueError, match="no price of TPU7x is published"):
        named_machines("v5e:4x4,tpu7x:4x4x4")
