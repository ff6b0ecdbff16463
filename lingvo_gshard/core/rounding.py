"""Rounding of quotients and products of decimal fractions, such as 100 * 7.2 / 8.

In binary floating point 100 * (1.2 * 6) / 8 is 89.99999999999999. A value that differs from
a whole number by a few roundings is taken for that number.
"""

from __future__ import annotations

import math

# A relative error of 16 roundings of a double.
_TOLERANCE = 2.0**-49


def floor(value: float) -> int:
    """Returns the largest whole number that is not above a value."""
    return math.floor(value + _slack(value))


def ceil(value: float) -> int:
    """Returns the smallest whole number that is not below a value."""
    return math.ceil(value - _slack(value))


def _slack(value: float) -> float:
    return _TOLERANCE * abs(value)
