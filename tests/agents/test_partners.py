"""Tests which hosts keep copies, by trying all distances."""

import pytest

from lingvo_gshard.wings.agents.partners import distances


def lost(racks, chosen, rack) -> int:
    """Returns how many hosts of a rack have no copy outside of it."""
    count = len(racks)
    return sum(
        racks[i] == rack and all(racks[(i + d) % count] == rack for d in chosen)
        for i in range(count)
    )


@pytest.mark.parametrize("racks", ["aabb", "aaabbb", "abab", "aaaabbcc", "aab", "aaaaabbb"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_rack_that_is_lost_costs_as_few_parts_as_possible(racks, copies):
    chosen = distances(racks, copies)
    assert len(set(chosen)) == copies and all(0 < d < len(racks) for d in chosen)
    at_once = [sum(lost(racks, [d], rack) for rack in set(racks)) for d in range(1, len(racks))]
    assert sum(lost(racks, chosen[:1], rack) for rack in set(racks)) == min(at_once)


@pytest.mark.parametrize(
    ("racks", "copies", "expected"),
    [
        (["", "", "", ""], 1, (1,)),
        (["", "", "", ""], 2, (1, 2)),
        (["a", "a", "b", "b"], 1, (2,)),
        (["a", "b", "a", "b"], 2, (1, 3)),
        (["a", "a", "a"], 2, (1, 2)),
        (["a", "b"], 2, (1,)),
        (["a"], 1, ()),
    ],
)
def test_distances(racks, copies, expected):
    assert distances(racks, copies) == expected
