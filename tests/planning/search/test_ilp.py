"""Compares the integer linear program with exhaustive search."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.wings.planning.search.ilp import OptionCost, pareto_optimal, solve

BOUNDARIES = ("data", "model")

choices = st.builds(
    OptionCost,
    seconds=st.integers(1, 40).map(float),
    resident=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    workspace=st.integers(0, 30),
    boundary=st.sampled_from(BOUNDARIES),
)
groups = st.lists(st.lists(choices, min_size=1, max_size=4), min_size=1, max_size=3)


@st.composite
def instances(draw):
    drawn = draw(groups)
    pairs = {}
    for pair in itertools.permutations(range(len(drawn)), 2):
        boundaries = {
            (a, b): draw(st.integers(0, 30)) for a in BOUNDARIES for b in BOUNDARIES if a != b
        }
        if draw(st.booleans()):
            pairs[pair] = {boundary: float(cost) for boundary, cost in boundaries.items()}
    return drawn, pairs, draw(st.integers(20, 200))


def seconds(chosen, pairs) -> float:
    total = sum(choice.seconds for choice in chosen)
    for (source, target), costs in pairs.items():
        total += costs.get((chosen[source].boundary, chosen[target].boundary), 0.0)
    return total


def fits(chosen, capacity: float) -> bool:
    working = max(choice.workspace for choice in chosen)
    moments = zip(*(choice.resident for choice in chosen), strict=True)
    return all(sum(moment) + working <= capacity for moment in moments)


def brute_force(groups, pairs, capacity: float) -> float | None:
    found = [
        seconds(chosen, pairs) for chosen in itertools.product(*groups) if fits(chosen, capacity)
    ]
    return min(found, default=None)


@hypothesis.given(instances())
def test_ilp_matches_exhaustive_search(instance):
    groups, pairs, capacity = instance
    best = brute_force(groups, pairs, capacity)
    numbers = solve(groups, pairs, capacity)
    if best is None:
        assert numbers is None
        return
    chosen = [of_group[number] for of_group, number in zip(groups, numbers, strict=True)]
    assert fits(chosen, capacity)
    assert seconds(chosen, pairs) == pytest.approx(best)


@hypothesis.given(instances())
def test_removing_dominated_options_keeps_an_optimum(instance):
    groups, pairs, capacity = instance
    few = [[of_group[i] for i in pareto_optimal(of_group)] for of_group in groups]
    assert brute_force(few, pairs, capacity) == brute_force(groups, pairs, capacity)


def test_first_of_equal_options_is_kept():
    one = OptionCost(1.0, (1, 1), 1, "data")
    assert pareto_optimal([one, one, OptionCost(1.0, (1, 1), 1, "model")]) == [0, 2]
