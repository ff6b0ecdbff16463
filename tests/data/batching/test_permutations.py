"""Tests permutations: each element once, uniform, and the same under every version."""

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.batching.permutations import permutation, permuted


@hypothesis.given(st.integers(0, 300), st.lists(st.integers(0, 2**64), max_size=4))
def test_permutation(size, key):
    order = permutation(size, *key)
    assert sorted(order) == list(range(size))
    np.testing.assert_array_equal(order, permutation(size, *key))


def test_permutations_are_stable_across_versions():
    # Saved data positions rely on this order.
    assert permutation(8, 1, 2).tolist() == [2, 7, 3, 1, 5, 6, 0, 4]
    assert permutation(8, 2, 1).tolist() != [2, 7, 3, 1, 5, 6, 0, 4]


def test_permutations_are_uniform():
    counts = collections.Counter(tuple(permutation(4, 7, k)) for k in range(24_000))
    assert len(counts) == 24
    # Chi-squared with 23 degrees of freedom exceeds 52 with probability 0.0005.
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 52


@pytest.mark.parametrize("size", [1, 5, 4095, 4096, 4097, 16_384, 50_001])
def test_random_access_gives_each_element_once(size):
    order = permuted(np.arange(size), size, 7, 1)
    assert sorted(order.tolist()) == list(range(size))
    places = np.array([size - 1, 0, size // 2])
    np.testing.assert_array_equal(permuted(places, size, 7, 1), order[places])
    if size > 5:
        assert (permuted(np.arange(size), size, 7, 2) != order).mean() > 0.9


def test_random_access_is_stable_across_versions():
    # Saved data positions rely on this order.
    assert permuted(np.arange(4), 10**9, 1, 2).tolist() == [
        797777509,
        962833475,
        959208908,
        525473702,
    ]


def test_random_access_is_uniform():
    """First and neighboring elements of many permutations fall into each part alike."""
    size, keys = 10_000, 4_000
    elements = np.array([permuted(np.array([0, 1]), size, 3, key) for key in range(keys)])
    for values in (elements[:, 0], elements[:, 1], np.diff(elements, axis=1)[:, 0] % size):
        counts = np.bincount(values * 20 // size, minlength=20)
        # Chi-squared with 19 degrees of freedom exceeds 46 with probability 0.0005.
        assert ((counts - keys / 20) ** 2 / (keys / 20)).sum() < 46


def test_neighbors_do_not_stay_neighbors():
    order = permuted(np.arange(100_000), 100_000, 5)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(order)) == 1).mean() < 1e-3
