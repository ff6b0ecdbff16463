# tests: wings/planning/training/goodput.py, wings/planning/training/formulas.py
"""Compares simulated trainings with closed formulas and with a simulation event by event."""

import numpy as np
import pytest

from lingvo_gshard.wings.planning.training import formulas
from lingvo_gshard.wings.planning.training.formulas import Interruptions
from lingvo_gshard.wings.planning.training.goodput import simulate
from tests.planning.training.young import first_order_goodput


def one_run(costs, work, interval, generator):
    """Returns the seconds and failures of one training, moved forward checkpoint by checkpoint."""
    clock, kept, failures = 0.0, 0.0, 0
    while True:
        failure = clock + generator.exponential(costs.between_failures)
        now, done, pending = clock + costs.restart, kept, []
        while now < failure and done < work:
            piece = min(interval, work - done)
            now, done = now + piece + costs.stall, done + piece
            pending.append((now + costs.write, done))
        complete = [saved for time, saved in pending if time <= failure]
        kept = complete[-1] if complete else kept
        if kept >= work:
            return pending[-1][0], failures
        clock, failures = failure, failures + 1


@pytest.mark.parametrize("mean", [500.0, 3_000.0, 30_000.0])
@pytest.mark.parametrize("stall", [1.0, 20.0, 100.0])
@pytest.mark.parametrize("write", [0.0, 50.0])
def test_goodput_equals_dalys_formula_within_a_percent(mean, stall, write):
    costs = Interruptions(between_failures=mean, stall=stall, write=write, restart=120.0)
    for factor in (0.5, 1.0, 2.0):
        interval = formulas.best_interval(costs) * factor
        runs = simulate(costs, 400 * mean, interval, 200, seed=3)
        goodput = runs.work * len(runs.seconds) / runs.seconds.sum()
        expected = formulas.expected_goodput(costs, interval)
        assert goodput == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("mean", "stall"), [(1e5, 5.0), (3e5, 60.0), (1e6, 10.0)])
def test_goodput_equals_youngs_formula_within_a_percent_if_failures_are_rare(mean, stall):
    costs = Interruptions(between_failures=mean, stall=stall, write=10.0, restart=600.0)
    interval = formulas.young_interval(costs)
    runs = simulate(costs, 100 * mean, interval, 500, seed=1)
    expected = first_order_goodput(costs, interval)
    assert runs.goodput.mean() == pytest.approx(expected, rel=0.01)


def test_runs_are_distributed_as_those_of_a_simulation_event_by_event():
    costs = Interruptions(between_failures=2_000.0, stall=30.0, write=70.0, restart=200.0)
    work, interval = 9_950.0, 300.0
    generator = np.random.default_rng(5)
    naive = np.array([one_run(costs, work, interval, generator) for _ in range(4_000)])
    runs = simulate(costs, work, interval, 40_000, seed=6)
    assert runs.seconds.mean() == pytest.approx(naive[:, 0].mean(), rel=0.015)
    assert runs.failures.mean() == pytest.approx(naive[:, 1].mean(), rel=0.03)
    for share in (0.05, 0.5, 0.95):
        quantiles = np.quantile(runs.seconds, share), np.quantile(naive[:, 0], share)
        assert quantiles[0] == pytest.approx(quantiles[1], rel=0.03)


def test_a_training_without_failures_takes_its_steps_and_checkpoints():
    costs = Interruptions(between_failures=1e15, stall=2.0, write=5.0, restart=60.0)
    runs = simulate(costs, 1_050.0, 100.0, 3)
    assert runs.seconds == pytest.approx(1_050 + 11 * 2 + 5 + 60)
    assert runs.failures.sum() == 0 and runs.lost == pytest.approx(5)


def test_times_add_up_and_a_seed_repeats_them():
    costs = Interruptions(between_failures=1_000.0, stall=5.0, write=5.0, restart=100.0)
    one, two, other = (simulate(costs, 1e4, 100.0, 50, seed) for seed in (1, 1, 2))
    assert (one.seconds == two.seconds).all() and (one.seconds != other.seconds).any()
    assert (one.lost > 0).all()
    assert one.restarting.min() >= 100 and one.seconds.min() > 1e4


def test_few_counted_failures_widen_the_range_but_keep_its_middle():
    costs = Interruptions(between_failures=1_000.0, stall=5.0, write=5.0, restart=100.0)
    known, guessed = (
        simulate(costs, 1e6, 100.0, 500, counted=counted).failures for counted in (None, 20)
    )
    assert guessed.std() > 3 * known.std()
    assert np.median(guessed) == pytest.approx(np.median(known), rel=0.1)
