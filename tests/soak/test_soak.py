# tests: /tests/soak/, training/run/loop.py, training/run/checkpoint/store.py
"""Runs a short soak, and checks that the comparison sees what faults may do to a run."""

import copy

import numpy as np
import pytest

from tests.soak import comparison
from tests.soak.comparison import Comparison, Tolerance
from tests.soak.soak import Plan, soak

STEPS = 6


def rows():
    return [
        {"step": step, "loss": 1.0 / step, "tokens_per_second": 10.0 * step}
        | ({"dev/loss": 2.0 / step} if step % 3 == 0 else {})
        for step in range(1, STEPS + 1)
    ]


def differences_of_rows(mine, tolerance=Tolerance()):  # noqa: B008
    result = Comparison()
    comparison.compare_rows(mine, rows(), STEPS, tolerance, result)
    return result.differences


def test_equal_rows_but_for_time_have_no_differences():
    mine = rows()
    mine[2]["tokens_per_second"] = 7.0
    assert differences_of_rows(mine) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda mine: mine.pop(2), "5 rows for 6 steps; missing [3], doubled []"),
        (lambda mine: mine.insert(3, mine[3]), "7 rows for 6 steps; missing [], doubled [4]"),
        (lambda mine: mine.reverse(), "6 rows for 6 steps; missing [], doubled []"),
        (lambda mine: mine[5].pop("dev/loss"), "step 6: metrics ['dev/loss'] are in one run only"),
        (lambda mine: mine[1].update(loss=np.nextafter(0.5, 1)), "step 2: loss is 0.5000000000000"),
    ],
)
def test_rows_that_faults_may_spoil_are_reported(change, words):
    mine = rows()
    change(mine)
    (difference,) = differences_of_rows(mine)
    assert words in difference


def test_tolerance_allows_rounding_but_no_missing_step():
    mine = rows()
    mine[1]["loss"] *= 1 + 1e-7
    assert differences_of_rows(mine, Tolerance.across_meshes()) == []
    mine[1]["loss"] *= 1.001
    assert len(differences_of_rows(mine, Tolerance.across_meshes())) == 1
    del mine[1]
    assert "missing [2]" in differences_of_rows(mine, Tolerance.across_meshes())[0]


def test_a_flipped_bit_of_an_array_is_reported():
    theirs = {"theta.w": np.array([0.5, 2.0], np.float32), "moments.w": np.zeros(2, np.float32)}
    mine = copy.deepcopy(theirs)
    mine["theta.w"].view(np.uint8)[0] ^= 1
    for tolerance, count in ((Tolerance(), 1), (Tolerance.across_meshes(), 0)):
        result = Comparison()
        comparison.compare_arrays(mine, theirs, tolerance, result)
        assert len(result.differences) == count and 0 < result.largest < 1e-6
    mine["theta.w"][1] += 2**-10
    result = Comparison()
    comparison.compare_arrays(mine, theirs, Tolerance.across_meshes(), result)
    assert "theta.w differs by 0.000977" in result.differences[0]
    del mine["moments.w"]
    comparison.compare_arrays(mine, theirs, Tolerance(), result)
    assert "['moments.w'] are in one only" in result.differences[1]


@pytest.mark.parametrize("name", ["SIGHUPP", "SIGKILL in a step"])
def test_skip_takes_names_of_faults_that_can_be_left_out(name):
    with pytest.raises(ValueError, match=f"--skip='{name}'"):
        Plan(skip=(name,))


@pytest.mark.slow
def test_a_short_soak_ends_with_the_weights_of_an_undisturbed_run(tmp_path):
    said = []
    outcome = soak(Plan(seed=2, faults=8, minutes=5), tmp_path, said.append)
    assert outcome.records.problems == [] and outcome.comparison.differences == []
    assert outcome.comparison.rows == outcome.steps > 20
    assert outcome.comparison.evaluations == outcome.steps // 20
    assert outcome.comparison.arrays > 50
    assert len(outcome.records.rows) >= 8 and len(said) >= 8
