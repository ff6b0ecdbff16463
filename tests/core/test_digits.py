"""Checks which texts are whole numbers."""

import random

import pytest

from lingvo_gshard.core.digits import whole_number


def test_what_str_writes_is_read():
    draw = random.Random(0)
    for number in (0, 1, 10, 10**18 - 1, *(draw.randrange(10**18) for _ in range(1000))):
        assert whole_number(str(number)) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\u00b2",
        "1\u00b2",
        "\u0663",
        "\u2460",
        "-1",
        "+1",
        "1_0",
        " 1",
        "1\n",
        "1.0",
        "1e3",
        "0x1",
    ]
    + ["00", "007", "9" * 19, "9" * 5000, "\ud800"],
)
def test_other_texts_are_none(text):
    assert whole_number(text) is None
