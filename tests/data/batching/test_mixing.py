"""Tests mixing: the temperature formula, exact shares, epochs, and random access."""

import collections
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.batching import batches


@hypothesis.given(
    st.lists(st.integers(1, 10**7), min_size=1, max_size=20),
    st.sampled_from([1.0, 1.5, 5.0, 100.0, math.inf]),
)
def test_probabilities_follow_the_formula(counts, temperature):
    expected = [n ** (1 / temperature) for n in counts]
    expected = np.array(expected) / sum(expected)
    actual = batches.temperature_probabilities(counts, temperature)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_probability_errors():
    with pytest.raises(ValueError, match="temperature must be at least 1, not 0.5"):
        batches.temperature_probabilities([1, 2], 0.5)
    with pytest.raises(ValueError, match="temperature"):
        batches.temperature_probabilities([1, 2], math.nan)
    for counts in ([], [1, 0]):
        with pytest.raises(ValueError, match="at least one sentence"):
            batches.temperature_probabilities(counts, 1.0)


def mixture(sizes, temperature=1.0, block_size=50, seed=3):
    starts = np.cumsum([0] + list(sizes))
    members = {f"l{i}": np.arange(starts[i], starts[i + 1]) for i in range(len(sizes))}
    return batches.Mixture(members, temperature, block_size, seed), members


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_shares_are_exact(temperature):
    m, members = mixture([1000, 100, 3], temperature)
    drawn = collections.Counter()
    for block in range(200):
        before = dict(drawn)
        sentences = m.block(block)
        for index, (language, own) in enumerate(members.items()):
            count = int(np.isin(sentences, own).sum())
            drawn[language] += count
            share = m.probabilities[index]
            assert abs(count - 50 * share) < 1 + 1e-6
            assert abs(drawn[language] - 50 * share * (block + 1)) <= 1 + 1e-6, before
        assert abs(len(sentences) - 50) <= len(members)


def test_every_epoch_is_a_new_permutation_of_the_sentences():
    m, members = mixture([70, 33], temperature=2.0)
    stream = np.concatenate([m.block(block) for block in range(60)])
    blocks = [m.block(block) for block in range(60)]
    for own in members.values():
        taken = [np.sort(block[np.isin(block, own)]) for block in blocks]
        counts = np.bincount(np.concatenate(taken) - own[0], minlength=len(own))
        assert counts.max() - counts.min() <= 1
    large = stream[stream < 70]
    assert not np.array_equal(large[:70], large[70:140])


def test_blocks_can_be_read_in_any_order():
    m, _ = mixture([70, 33])
    late = m.block(10**9)
    np.testing.assert_array_equal(late, mixture([70, 33])[0].block(10**9))
    assert not np.array_equal(late, m.block(10**9 + 1))
    assert not np.array_equal(m.block(5), mixture([70, 33], seed=4)[0].block(5))
