"""Compares divided times with sums by hand, and with a walk over every unit of time."""

import collections

import hypothesis
import hypothesis.strategies as st
import pytest

from lingvo_gshard.wings.profiling.timeline import Interval, Role, divide, overlap


def compute(key, start, end):
    return Interval(start, end, key, Role.COMPUTE)


def transfer(key, start, end):
    return Interval(start, end, key, Role.TRANSFER)


def enclosing(start, end):
    return Interval(start, end, "run", Role.ENCLOSING)


def test_operations_one_after_the_other_get_their_own_time():
    division = divide([compute("a", 2, 5), compute("b", 5, 6), compute("a", 7, 8)], (0, 10))
    assert division.shares == {"a": 4, "b": 1}
    assert division.idle == [(0, 2), (6, 7), (8, 10)]


def test_operations_at_the_same_time_share_it():
    # a alone for 2, with b for 4, with b and c for 3, then c alone for 1.
    division = divide([compute("a", 0, 9), compute("b", 2, 9), compute("c", 6, 10)], (0, 10))
    assert division.shares == pytest.approx({"a": 2 + 2 + 1, "b": 2 + 1, "c": 1 + 1})
    assert division.active == {"a": 9, "b": 7, "c": 4}


def test_a_collective_gets_only_the_time_in_which_nothing_computes():
    division = divide([compute("a", 0, 4), transfer("r", 2, 10), compute("b", 7, 8)], (0, 10))
    assert division.shares == pytest.approx({"a": 4, "b": 1, "r": 5})
    assert division.active["r"] == 8
    assert division.hidden["r"] == 2 + 1


def test_pauses_within_a_program_are_told_from_idle_time():
    division = divide([enclosing(1, 9), compute("a", 2, 4), compute("b", 6, 9)], (0, 12))
    assert division.pauses == 1 + 2
    assert division.idle == [(0, 1), (9, 12)]


def test_what_is_outside_of_the_window_is_cut_off():
    division = divide([compute("a", 0, 4), compute("b", 9, 20)], (2, 10))
    assert division.shares == {"a": 2, "b": 1}


_SOME = st.lists(
    st.builds(
        lambda start, length, key, role: Interval(start, start + length, (role, key), role),
        st.integers(0, 30),
        st.integers(0, 12),
        st.sampled_from("abc"),
        st.sampled_from(Role),
    ),
    max_size=12,
)


def _taken(times):
    return {key: time for key, time in times.items() if time}


@hypothesis.given(_SOME)
@hypothesis.settings(max_examples=60, deadline=None)
def test_the_parts_are_those_of_a_walk_and_add_up(intervals):
    window = 5, 35
    shares, hidden, pauses, idle = collections.Counter(), collections.Counter(), 0, 0
    for time in range(*window):
        active = [each for each in intervals if each.start <= time < each.end]
        computing = [each for each in active if each.role == Role.COMPUTE]
        moving = [each for each in active if each.role == Role.TRANSFER]
        for each in computing or moving:
            shares[each.key] += 1 / len(computing or moving)
        for each in moving if computing else []:
            hidden[each.key] += 1
        pauses += bool(active) and not computing and not moving
        idle += not active
    division = divide(intervals, window)
    assert _taken(division.shares) == pytest.approx(dict(shares))
    assert _taken(division.hidden) == hidden
    assert division.pauses == pauses
    assert sum(end - start for start, end in division.idle) == idle
    total = sum(division.shares.values()) + pauses + idle
    assert total == pytest.approx(window[1] - window[0])


def test_overlap_of_two_lists():
    assert overlap([(0, 4), (6, 10)], [(1, 2), (3, 7), (9, 12)]) == 1 + 1 + 1 + 1
    assert overlap([(0, 4)], []) == 0
