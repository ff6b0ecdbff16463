"""Tests random numbers: equal in eager and compiled mode, with the right distributions."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from lingvo_gshard.core import random_numbers

KEY = tf.constant([5, 9])
SAMPLERS = {
    "uniform": stats.uniform(),
    "hashed_uniform": stats.uniform(),
    "normal": stats.norm(),
    "truncated_normal": stats.truncnorm(-2, 2),
}


def test_keys_differ_by_name_and_by_key():
    keys = {
        tuple(random_numbers.fold_in(tf.constant([seed, 0]), name).numpy())
        for seed in range(3)
        for name in ("a", "b", "a.b")
    }
    assert len(keys) == 9


def test_hashed_keys_of_neighbors_are_unrelated():
    keys = np.array(
        [
            random_numbers.hashed_fold_in_word(tf.constant([1, step]), word).numpy()
            for step in range(30)
            for word in range(30)
        ],
        np.uint32,
    )
    assert len(np.unique(keys, axis=0)) == 900
    bits = np.unpackbits(keys.view(np.uint8), axis=1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.08
    drawn = random_numbers.hashed_uniform([1000], tf.constant(keys[0].view(np.int32)))
    again = random_numbers.hashed_uniform([1000], tf.constant(keys[1].view(np.int32)))
    assert abs(np.corrcoef(drawn, again)[0, 1]) < 0.1


@pytest.mark.parametrize("shape", [[], [3, 5], [1000, 7]])
def test_bits_are_the_same_eager_and_compiled(shape):
    def function(key):
        key = random_numbers.fold_in(key, "encoder.layers[3]")
        hashed = random_numbers.hashed_words(shape, key)
        return key, random_numbers.words(shape, key), hashed, random_numbers.uniform(shape, key)

    eager = function(KEY)
    for mode in (tf.function(function), tf.function(function, jit_compile=True)):
        for one, other in zip(eager, mode(KEY), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", SAMPLERS)
def test_numbers_are_the_same_eager_and_compiled(name):
    sampler = getattr(random_numbers, name)
    compiled = tf.function(lambda key: sampler([1000], key), jit_compile=True)
    np.testing.assert_allclose(sampler([1000], KEY), compiled(KEY), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_follow_the_named_distribution(name):
    numbers = getattr(random_numbers, name)([200_000], KEY).numpy().astype(np.float64)
    assert stats.kstest(numbers, SAMPLERS[name].cdf).pvalue > 0.01
    assert np.isfinite(numbers).all()


def test_samples_are_finite_at_the_ends_of_the_interval(monkeypatch):
    ends = tf.constant([0, 2**32 - 1], tf.uint32)
    monkeypatch.setattr(random_numbers, "words", lambda shape, key: ends)
    low, high = random_numbers.uniform([2], KEY).numpy()
    assert 0 < low < high < 1
    np.testing.assert_allclose(random_numbers.normal([2], KEY), [-5.3, 5.3], atol=0.1)
    np.testing.assert_allclose(random_numbers.truncated_normal([2], KEY), [-2, 2], atol=1e-3)


def hashed_uniform(key, size: int = 1 << 18) -> np.ndarray:
    return random_numbers.hashed_words([size], tf.constant(key)).numpy() / 2.0**32


@pytest.mark.parametrize("key", [(0, 0), (5, 9), (-7, 2**31 - 1)])
def test_hashed_words_are_uniform_and_independent_of_their_neighbors(key):
    numbers = hashed_uniform(key)
    assert stats.kstest(numbers, "uniform").pvalue > 0.001
    for distance in (1, 2, 128, 4096):
        assert abs(np.corrcoef(numbers[distance:], numbers[:-distance])[0, 1]) < 0.01


@pytest.mark.parametrize("other", [(5, 10), (6, 9), (5 + 2**20, 9)])
def test_hashed_words_of_different_keys_are_independent(other):
    mine, theirs = hashed_uniform((5, 9)), hashed_uniform(other)
    assert abs(np.corrcoef(mine, theirs)[0, 1]) < 0.01
    bits = np.unpackbits((mine * 2**32).astype(np.uint32).view(np.uint8))
    other_bits = np.unpackbits((theirs * 2**32).astype(np.uint32).view(np.uint8))
    assert abs((bits == other_bits).mean() - 0.5) < 0.005
