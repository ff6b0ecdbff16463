# tests: wings/planning/loads/devices.py
"""Tests placements against all placements of small cases, and against lower bounds."""

import itertools

import numpy as np
import pytest

from lingvo_gshard.wings.planning.loads.devices import EMPTY, copies, least_largest, place


def largest(load, placement):
    """Returns the largest load of a device, by a loop."""
    counts = [sum(e == expert for part in placement for e in part) for expert in range(len(load))]
    return max(sum(load[e] / counts[e] for e in part if e != EMPTY) for part in placement)


def best_of_all(shares, parts, places):
    """Returns the smallest possible largest load, by trying all divisions of the copies."""
    if parts == 1:
        return sum(shares)
    first, best = shares[0], np.inf
    rest = range(1, len(shares))
    # The first copy is on some device: which one does not matter.
    for others in itertools.combinations(rest, places - 1):
        own = first + sum(shares[i] for i in others)
        if own < best:
            left = [shares[i] for i in rest if i not in others]
            best = min(best, max(own, best_of_all(left, parts - 1, places)))
    return best


def loads_of(experts, seed):
    """Returns loads as skewed as those of routers: powers of the rank, in random order."""
    rng = np.random.default_rng(seed)
    return rng.permutation((1.0 + np.arange(experts)) ** -rng.uniform(0.2, 1.2)) * 1000


@pytest.mark.parametrize(
    ("experts", "parts", "replicas"),
    [(6, 2, 0), (8, 4, 0), (9, 3, 0), (10, 5, 0), (8, 2, 0), (7, 3, 2), (8, 4, 4), (5, 2, 0)],
)
def test_placements_are_near_the_best_of_all(experts, parts, replicas):
    gaps = []
    for seed in range(25):
        load = loads_of(experts, seed)
        placement = place(load, parts, replicas)
        places = -(-(experts + replicas) // parts)
        assert placement.shape == (parts, places)
        _, shares = copies(load, replicas, parts)
        shares = [*shares, *[0.0] * (parts * places - len(shares))]
        best = best_of_all(shares, parts, places)
        found = largest(load, placement)
        assert least_largest(load, parts, replicas) <= best + 1e-9
        assert best <= found + 1e-9
        gaps.append(found / best - 1)
    # Graham's rule alone is within 1/3; swaps leave a few percent in the worst of the cases.
    assert max(gaps) < 0.08 and np.mean(gaps) < 0.01


@pytest.mark.parametrize(("experts", "parts", "replicas"), [(64, 8, 0), (256, 32, 32), (60, 8, 0)])
def test_every_expert_has_its_places(experts, parts, replicas):
    load = loads_of(experts, 1)
    placement = place(load, parts, replicas)
    held = placement[placement != EMPTY]
    counts = np.bincount(held, minlength=experts)
    assert counts.min() == 1 and counts.sum() == experts + replicas
    assert largest(load, placement) <= 1.05 * least_largest(load, parts, replicas)


def test_replicas_go_to_the_largest_load_of_a_copy():
    """By trying all ways to give out the copies."""
    for seed in range(10):
        load = loads_of(5, seed)
        experts, shares = copies(load, 4, most=3)
        counts = np.bincount(experts, minlength=5)
        options = itertools.combinations_with_replacement(range(5), 4)
        tried = [1 + np.bincount(option, minlength=5) for option in options]
        least = min((load / each).max() for each in tried if each.max() <= 3)
        assert (load / counts).max() == pytest.approx(least) and counts.max() <= 3
        assert shares.sum() == pytest.approx(load.sum())


def test_an_expert_that_nothing_can_balance_is_alone_on_its_device():
    load = np.array([1000.0, 1, 1, 1, 1, 1])
    placement = place(load, 3, replicas=3)
    assert [0 in part for part in placement] == [True] * 3
    assert largest(load, placement) == pytest.approx(1005 / 3, rel=0.01)
    assert place(np.zeros(4), 2).shape == (2, 2)
