"""Compares a small profile with plans: what fits, what does not, and the ratios."""

import pytest

from lingvo_gshard.wings.planning.operation_rows import ATTENTION, COLLECTIVES, PRODUCTS
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.profiling.comparison import (
    calibrate,
    check_comparable,
    check_plan,
    compare,
)
from lingvo_gshard.wings.profiling.profile import HOST, INPUT_WAIT, PAUSES
from tests.planning import example_plan
from tests.profiling.cpu_trace import CpuTrace
from tests.profiling.test_summary import MICRO, one_step, profile_of

NAME = "an.experiment"


def record(**changes) -> dict:
    """Returns a plan of one CPU device in JSON's types."""
    plan = example_plan.example_plan() | {
        "name": NAME,
        "topology": "cpu:1",
        "devices": 1,
        "mesh": "data=1",
        "seconds_per_step": 50 * MICRO,
        "kinds": [
            {"kind": PRODUCTS, "flops": 1, "seconds_bound": 1 * MICRO, "seconds": 5 * MICRO},
            {"kind": ATTENTION, "flops": 1, "seconds_bound": 1 * MICRO, "seconds": 26 * MICRO},
            {"kind": COLLECTIVES, "flops": 0, "seconds_bound": 0.0, "seconds": 0.0},
        ],
        "layers": [
            {**example_plan.example_plan()["layers"][0], **row}
            for row in (
                {"layer": "ffn", "phase": "forward", "seconds": 4 * MICRO},
                {"layer": "ffn", "phase": "forward", "seconds": 1 * MICRO},
                {"layer": "planned/only", "phase": "forward", "seconds": 2 * MICRO},
            )
        ],
    }
    return plan | changes


def plan(**changes) -> Plan:
    return example_plan.as_plan(record(**changes))


@pytest.fixture(scope="module")
def profile():
    trace = CpuTrace()
    trace.step(3, 0, 8, 100)
    one_step(trace, 0, 8)
    return profile_of(trace, 1)


def test_predicted_beside_measured(profile):
    found = compare(profile, plan())
    assert (found.predicted, found.measured) == pytest.approx((50 * MICRO, 100 * MICRO))
    kinds = {row.part: (row.predicted, row.measured) for row in found.kinds}
    assert kinds[PRODUCTS] == pytest.approx((5 * MICRO, 10 * MICRO))
    assert kinds[ATTENTION] == pytest.approx((26 * MICRO, 13 * MICRO))
    layers = {(row.part, row.phase): (row.predicted, row.measured) for row in found.layers}
    assert layers["ffn", "forward"] == pytest.approx((5 * MICRO, 10 * MICRO))
    assert layers["norm", "forward"] == pytest.approx((0, 3 * MICRO))
    assert layers["planned/only", "forward"] == pytest.approx((2 * MICRO, 0))


def test_the_ratios_of_kinds_that_both_know(profile):
    found = calibrate(profile, plan())
    assert {row.kind: row.ratio for row in found.kinds} == pytest.approx(
        {PRODUCTS: 2.0, ATTENTION: 0.5}
    )
    assert (found.chip, found.steps, found.experiment) == ("cpu", "3:3", NAME)
    outside = profile.seconds_of(PAUSES) + profile.seconds_of(HOST)
    assert found.seconds_outside == pytest.approx(outside)
    assert outside + profile.seconds_of(INPUT_WAIT) < profile.seconds_per_step


def test_a_calibrated_plan_gives_no_calibration(profile):
    assert calibrate(profile, plan(is_calibrated=True)) is None


def test_plans_without_times():
    check_comparable(plan(), "plan.json")
    with pytest.raises(ValueError, match="^`plan=plan.json`: .* not tell kinds of work apart"):
        check_comparable(plan(kinds=[]), "plan.json")
    with pytest.raises(ValueError, match="^`plan=plan.json` has no times to compare"):
        check_comparable(None, "plan.json")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"devices": 8, "mesh": "data=8"},
            "a plan for mesh data=8 of 8 devices, but this run has mesh data=1 of 1",
        ),
        ({"topology": "v3:2x2"}, "a plan for v3:2x2 (TPU v3), but this run's devices are of the"),
    ],
)
def test_plans_of_other_devices(changes, reason):
    check_plan(plan(), "p.json", "data=1", 1, "cpu")
    with pytest.raises(ValueError) as error:
        check_plan(plan(**changes), "p.json", "data=1", 1, "cpu")
    assert str(error.value).startswith(f"`plan=p.json`: {reason}")
