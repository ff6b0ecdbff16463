"""Compares closed formulas of checkpoint intervals with each other and with a search."""

import numpy as np
import pytest

from lingvo_gshard.wings.planning.training import formulas
from lingvo_gshard.wings.planning.training.formulas import Interruptions
from tests.planning.training.young import first_order_goodput

COSTS = [
    Interruptions(between_failures=mean, stall=stall, write=write, restart=restart)
    for mean, stall, write, restart in (
        (50_000.0, 10.0, 0.0, 600.0),
        (10_000.0, 30.0, 400.0, 900.0),
        (1_000.0, 100.0, 0.0, 300.0),
        (3_600.0, 300.0, 200.0, 3_600.0),
        (1e6, 0.2, 0.1, 60.0),
    )
]


@pytest.mark.parametrize("costs", COSTS)
def test_best_interval_is_where_a_search_finds_it(costs):
    tried = np.geomspace(costs.stall / 10, costs.between_failures * 2, 20_001)
    goodputs = [formulas.expected_goodput(costs, interval) for interval in tried]
    best = formulas.best_interval(costs)
    assert best == pytest.approx(tried[np.argmax(goodputs)], rel=2e-2)
    assert formulas.expected_goodput(costs, best) >= max(goodputs) * (1 - 1e-9)


@pytest.mark.parametrize("costs", COSTS)
def test_dalys_interval_is_close_to_the_best(costs):
    assert formulas.daly_interval(costs) == pytest.approx(formulas.best_interval(costs), rel=0.01)


def test_youngs_interval_is_the_limit_of_rare_failures():
    costs = Interruptions(between_failures=1e9, stall=1.0, write=0.0, restart=60.0)
    young = formulas.young_interval(costs)
    assert young == pytest.approx(44_721.36, rel=1e-6)
    assert formulas.best_interval(costs) == pytest.approx(young, rel=1e-3)
    exact = formulas.expected_goodput(costs, young)
    assert first_order_goodput(costs, young) == pytest.approx(exact, rel=1e-6)


def test_an_interval_is_no_shorter_than_a_write_or_a_step():
    costs = Interruptions(between_failures=1e5, stall=0.01, write=900.0, restart=600.0)
    assert formulas.best_interval(costs) == pytest.approx(899.99)
    assert formulas.best_interval(costs, shortest=2000.0) == 2000.0


def test_a_machine_that_fails_all_the_time_makes_no_progress():
    costs = Interruptions(between_failures=0.1, stall=10.0, write=10.0, restart=600.0)
    assert formulas.expected_goodput(costs, formulas.best_interval(costs)) == 0.0
    assert formulas.daly_interval(costs) == costs.between_failures


def test_checkpoints_without_a_stall_are_taken_as_often_as_they_can_be():
    costs = Interruptions(between_failures=1e4, stall=0.0, write=0.0, restart=600.0)
    assert formulas.best_interval(costs, shortest=3.0) == pytest.approx(3.0, abs=1.0)
