# tests: wings/planning/plan/diff.py
"""Checks limits on the change of a plan."""

import pytest

from lingvo_gshard.wings.planning.plan.diff import parse
from tests.planning import example_plan


def exceeded(text: str, change) -> list[bool]:
    before, after = example_plan.example_plan(), example_plan.example_plan()
    change(after)
    plans = [example_plan.as_plan(record) for record in (before, after)]
    return [limit.check(*plans).is_exceeded for limit in parse(text)]


def set_peak(factor: float, extra: int = 0):
    def change(record):
        memory = record["bytes_per_device"]
        memory["peak"] = round(memory["peak"] * factor) + extra

    return change


@pytest.mark.parametrize(
    ("text", "change", "expected"),
    [
        ("peak>+2%", set_peak(1.019), [False]),
        ("peak>+2%", set_peak(1.021), [True]),
        ("peak>2%,peak>+1GiB", set_peak(1, 2**30), [True, False]),
        ("peak>+1GiB", set_peak(1, 2**30 + 1), [True]),
        ("peak > 0, peak < -1MiB", set_peak(1, -(2**20)), [False, False]),
        ("peak<-1MiB", set_peak(1, -(2**20) - 1), [True]),
        ("mfu<-3%", lambda plan: plan.update(mfu=None), [True]),
        ("", set_peak(9), []),
    ],
)
def test_limits_of_memory_and_time(text, change, expected):
    assert exceeded(text, change) == expected


def test_a_new_collective_exceeds_its_limit_and_that_of_all():
    def add(plan):
        plan["collectives"].append({**plan["collectives"][0], "kind": "all-gather", "count": 1})

    found = exceeded("all-gather>0,collectives>0,collectives>1,all-to-all>0", add)
    assert found == [True, True, False, False]


def test_collectives_across_slices_count_for_their_kind_too():
    def add(plan):
        row = {**plan["collectives"][0], "kind": "all-gather across slices", "count": 1}
        plan["collectives"].append(row)

    found = exceeded("all-gather>0,across-slices>0,across-slices>1,all-reduce>0", add)
    assert found == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("peak", "'peak' is no limit; expected such as peak>"),
        ("peak>much", "'peak>much' is no limit"),
        ("peak>1.2.3", "1.2.3 is no number"),
        ("al-gather>0", "unknown quantity 'al-gather'. Did you mean 'all-gather'"),
        ("peak>3GB", "unknown unit 'GB' of peak; expected B, KiB, MiB, GiB or %"),
    ],
)
def test_wrong_limits_are_explained(text, words):
    with pytest.raises(ValueError, match=f"`fail_on`: .*{words}"):
        parse(text)
