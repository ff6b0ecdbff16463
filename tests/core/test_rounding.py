# tests: core/random_numbers.py
"""Compares rounding with exact fractions."""

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st

from lingvo_gshard import testing
from lingvo_gshard.core import random_numbers

counts = st.integers(1, 100_000)


class RoundingTest(testing.TestCase):
    @hypothesis.settings(deadline=None)
    @hypothesis.given(counts, counts, st.integers(1, 999), st.integers(1, 8))
    def test_decimal_factors_are_meant_exactly(self, count, parts, hundredths, k):
        exact = Fraction(hundredths, 100) * k * count / parts
        for value in (count * (hundredths / 100 * k) / parts, hundredths / 100 * k * count / parts):
            # Other such fractions are further from whole numbers than rounding errors.
            self.assertEqual(random_numbers.floor(value), math.floor(exact))
            self.assertEqual(random_numbers.ceil(value), math.ceil(exact))

    def test_known_faults_of_floating_point(self):
        self.assertEqual(random_numbers.floor(100 * (1.2 * 6) / 8), 90)
        self.assertEqual(random_numbers.ceil(1.1 * 100 / 10), 11)
        self.assertEqual((random_numbers.floor(2.5), random_numbers.ceil(2.5)), (2, 3))


if __name__ == "__main__":
    testing.main()
