"""Tests random numbers: equal in eager and compiled mode, with the right distributions."""

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from scipy import stats

from lingvo_gshard import testing
from lingvo_gshard.core import random_numbers

KEY = tf.constant([5, 9])
SAMPLERS = {
    "uniform": stats.uniform(),
    "hashed_uniform": stats.uniform(),
    "normal": stats.norm(),
    "truncated_normal": stats.truncnorm(-2, 2),
}


def hashed_uniform(key, size: int = 1 << 18) -> np.ndarray:
    return random_numbers.hashed_words([size], tf.constant(key)).numpy() / 2.0**32


def low_bias_hash(x: int) -> int:
    """Returns C. Wellons' 32-bit hash of an integer, https://nullprogram.com/blog/2018/07/31/."""
    x %= 2**32
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


class RandomNumbersTest(testing.TestCase, parameterized.TestCase):
    def test_keys_differ_by_name_and_by_key(self):
        keys = {
            tuple(random_numbers.fold_in(tf.constant([seed, 0]), name).numpy())
            for seed in range(3)
            for name in ("a", "b", "a.b")
        }
        self.assertEqual(len(keys), 9)

    def test_hashed_keys_of_neighbors_are_unrelated(self):
        keys = np.array(
            [
                random_numbers.hashed_fold_in_word(tf.constant([1, step]), word).numpy()
                for step in range(30)
                for word in range(30)
            ],
            np.uint32,
        )
        self.assertEqual(len(np.unique(keys, axis=0)), 900)
        bits = np.unpackbits(keys.view(np.uint8), axis=1)
        self.assertLess(np.abs(bits.mean(axis=0) - 0.5).max(), 0.08)
        drawn = random_numbers.hashed_uniform([1000], tf.constant(keys[0].view(np.int32)))
        again = random_numbers.hashed_uniform([1000], tf.constant(keys[1].view(np.int32)))
        self.assertLess(abs(np.corrcoef(drawn, again)[0, 1]), 0.1)

    def test_hashes_are_those_of_python_integers(self):
        """Runs that are continued draw the numbers that they would have drawn."""
        first, second, word = 5, 2**32 - 9, 123_456_789
        key = tf.constant([first, second - 2**32])
        one = low_bias_hash(low_bias_hash(low_bias_hash(first) + second) + word)
        other = low_bias_hash(low_bias_hash(low_bias_hash(word) + first) + second)
        folded = random_numbers.hashed_fold_in_word(key, word).numpy()
        self.assertEqual(folded.view(np.uint32).tolist(), [one, other])
        expected = [low_bias_hash(low_bias_hash(i + first) + second) for i in range(6)]
        drawn = random_numbers.hashed_words([2, 3], key).numpy()
        self.assertEqual(drawn.flatten().tolist(), expected)

    @parameterized.parameters(([],), ([3, 5],), ([1000, 7],))
    def test_bits_are_the_same_eager_and_compiled(self, shape):
        def function(key):
            key = random_numbers.fold_in(key, "encoder.layers[3]")
            hashed = random_numbers.hashed_words(shape, key)
            return key, random_numbers.words(shape, key), hashed, random_numbers.uniform(shape, key)

        eager = function(KEY)
        for mode in (tf.function(function), tf.function(function, jit_compile=True)):
            for one, other in zip(eager, mode(KEY), strict=True):
                self.assertAllEqual(one, other)

    @parameterized.parameters(*SAMPLERS)
    def test_numbers_are_the_same_eager_and_compiled(self, name):
        sampler = getattr(random_numbers, name)
        compiled = tf.function(lambda key: sampler([1000], key), jit_compile=True)
        self.assertAllClose(sampler([1000], KEY), compiled(KEY), rtol=1e-5, atol=1e-6)

    @parameterized.parameters(*SAMPLERS)
    def test_samples_follow_the_named_distribution(self, name):
        numbers = getattr(random_numbers, name)([200_000], KEY).numpy().astype(np.float64)
        self.assertGreater(stats.kstest(numbers, SAMPLERS[name].cdf).pvalue, 0.01)
        self.assertTrue(np.isfinite(numbers).all())

    def test_samples_are_finite_at_the_ends_of_the_interval(self):
        ends = tf.constant([0, 2**32 - 1], tf.uint32)
        self.enter_context(mock.patch.object(random_numbers, "words", lambda shape, key: ends))
        low, high = random_numbers.uniform([2], KEY).numpy()
        self.assertLess(0, low)
        self.assertLess(low, high)
        self.assertLess(high, 1)
        self.assertAllClose(random_numbers.normal([2], KEY), [-5.3, 5.3], rtol=1e-7, atol=0.1)
        self.assertAllClose(
            random_numbers.truncated_normal([2], KEY), [-2, 2], rtol=1e-7, atol=1e-3
        )

    @parameterized.parameters(((0, 0),), ((5, 9),), ((-7, 2**31 - 1),))
    def test_hashed_words_are_uniform_and_independent_of_their_neighbors(self, key):
        numbers = hashed_uniform(key)
        self.assertGreater(stats.kstest(numbers, "uniform").pvalue, 0.001)
        for distance in (1, 2, 128, 4096):
            self.assertLess(abs(np.corrcoef(numbers[distance:], numbers[:-distance])[0, 1]), 0.01)

    @parameterized.parameters(((5, 10),), ((6, 9),), ((5 + 2**20, 9),))
    def test_hashed_words_of_different_keys_are_independent(self, other):
        mine, theirs = hashed_uniform((5, 9)), hashed_uniform(other)
        self.assertLess(abs(np.corrcoef(mine, theirs)[0, 1]), 0.01)
        bits = np.unpackbits((mine * 2**32).astype(np.uint32).view(np.uint8))
        other_bits = np.unpackbits((theirs * 2**32).astype(np.uint32).view(np.uint8))
        self.assertLess(abs((bits == other_bits).mean() - 0.5), 0.005)


if __name__ == "__main__":
    testing.main()
