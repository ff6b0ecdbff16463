"""Numbers as engineers write them."""

import pytest

from lingvo_gshard.tools import _units


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (_units.in_bytes, 0, "0 B"),
        (_units.in_bytes, 1023, "1,023 B"),
        (_units.in_bytes, 1024, "1 KiB"),
        (_units.in_bytes, 2**20 - 1, "1 MiB"),
        (_units.in_bytes, 16 * 2**30, "16 GiB"),
        (_units.in_bytes, 4.18 * 2**40, "4.18 TiB"),
        (_units.in_flops, 9.24e12, "9.24 TFLOP"),
        (_units.in_flops, 999.6e9, "1 TFLOP"),
        (_units.in_seconds, 0, "0 s"),
        (_units.in_seconds, 3e-9, "3 ns"),
        (_units.in_seconds, 28.4e-6, "28.4 us"),
        (_units.in_seconds, 0.9999, "1 s"),
        (_units.in_seconds, 0.261, "261 ms"),
        (_units.in_seconds, 90, "90 s"),
        (_units.in_large, 619.3e9, "619 billion"),
        (_units.in_large, 17_693.4, "17,693"),
        (_units.in_large, 3.831, "3.83"),
        (_units.in_share, 0.404, "40%"),
        (_units.in_share, 0.0123, "1.2%"),
        (_units.in_count, 1_048_576, "1,048,576"),
        (_units.digits, 0.00195312, "0.00195"),
        (_units.digits, -12.345, "-12.3"),
        (_units.digits, 5.10, "5.1"),
        (_units.in_bytes, None, "-"),
        (_units.in_seconds, None, "-"),
        (_units.in_share, None, "-"),
    ],
)
def test_three_digits_and_a_unit(function, value, text):
    assert function(value) == text
