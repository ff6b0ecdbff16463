"""Tests the prefetcher: order, errors, positions, and stopping its thread."""

import threading

import pytest

from lingvo_gshard.data.batching import batches


class Counter:
    """Counts up and raises at a chosen number."""

    def __init__(self, fails_at=-1):
        self.at, self.fails_at = 0, fails_at

    def __next__(self):
        if self.at == self.fails_at:
            raise RuntimeError("broken")
        self.at += 1
        return self.at - 1

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_order_and_positions(depth):
    items = batches.Prefetcher(Counter(), depth)
    assert items.get_state() == {"at": 0}
    for expected in range(10):
        assert next(items) == expected
        assert items.get_state() == {"at": expected + 1}
    items.set_state({"at": 4})
    assert [next(items), next(items)] == [4, 5]
    items.close()


def test_prefetches_at_most_depth_items():
    counter = Counter()
    items = batches.Prefetcher(counter, 3)
    next(items)
    items.close()
    assert 1 <= counter.at <= 4


@pytest.mark.parametrize("depth", [0, 2])
def test_errors_are_raised_in_order(depth):
    items = batches.Prefetcher(Counter(fails_at=2), depth)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(RuntimeError, match="broken"):
        next(items)
    assert items.get_state() == {"at": 2}
    items.close()


def test_close_stops_the_thread():
    before = threading.active_count()
    items = batches.Prefetcher(Counter(), 2)
    next(items)
    items.close()
    assert threading.active_count() == before


def test_rejects_a_negative_depth():
    with pytest.raises(ValueError, match="prefetch_batches must be at least 0, not -1"):
        batches.Prefetcher(Counter(), -1)
