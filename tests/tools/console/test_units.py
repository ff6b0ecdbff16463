"""Tests the formatting of numbers with units."""

import pytest

from lingvo_gshard.tools.console import units


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.in_bytes, 0, "0 B"),
        (units.in_bytes, 1023, "1,023 B"),
        (units.in_bytes, 1024, "1 KiB"),
        (units.in_bytes, 2**20 - 1, "1 MiB"),
        (units.in_bytes, 16 * 2**30, "16 GiB"),
        (units.in_bytes, 4.18 * 2**40, "4.18 TiB"),
        (units.in_flops, 9.24e12, "9.24 TFLOP"),
        (units.in_flops, 999.6e9, "1 TFLOP"),
        (units.in_seconds, 0, "0 s"),
        (units.in_seconds, 3e-9, "3 ns"),
        (units.in_seconds, 4.67e-11, "under 0.1 ns"),
        (units.in_seconds, 28.4e-6, "28.4 us"),
        (units.in_seconds, 0.9999, "1 s"),
        (units.in_seconds, 0.261, "261 ms"),
        (units.in_seconds, 90, "90 s"),
        (units.in_large, 619.3e9, "619 billion"),
        (units.in_large, 17_693.4, "17,693"),
        (units.in_large, 3.831, "3.83"),
        (units.in_share, 0.404, "40%"),
        (units.in_share, 0.0123, "1.2%"),
        (units.in_fine_share, 0.9994, "99.9%"),
        (units.in_count, 1_048_576, "1,048,576"),
        (units.digits, 0.00195312, "0.00195"),
        (units.digits, -12.345, "-12.3"),
        (units.digits, 5.10, "5.1"),
        (units.in_bytes, None, "-"),
        (units.in_seconds, None, "-"),
        (units.in_share, None, "-"),
        (units.in_fine_share, None, "-"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(function, value, text):
    assert function(value) == text
