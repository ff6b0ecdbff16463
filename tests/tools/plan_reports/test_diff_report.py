"""Checks the report of gshard-plan diff."""

import io
import re

import pytest

from lingvo_gshard.tools.console import Console
from lingvo_gshard.tools.plan_reports import diff_report
from lingvo_gshard.wings.planning.plan import diff
from tests.planning import example_plan


def printed(before, after, width=100):
    """Returns the lines that a console of this width shows of the changes."""
    stream = io.StringIO()
    changes = diff.diff(example_plan.as_plan(before), example_plan.as_plan(after))
    diff_report.print_diff(changes, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


def test_changes_are_listed_by_section():
    before, after = example_plan.example_plan(), example_plan.too_large()
    after["tensors"][0]["split"] = "V->data"
    after["tensors"][0]["bytes_per_device"] = 512_000
    after["notes"] = ["other"]
    lines = printed(before, after)
    text = "\n".join(lines)
    for expected in (
        r"headline +before +after +ratio\n─+\nfits +yes +no",
        r"activations +2.22 GiB +16.2 GiB +x7.32",
        r"encoder.embedding.table \(weights\) *\n  split +V->data *\n"
        r"  bytes_per_device +250 MiB +500 KiB +x0.00195",
        r"\nother +- +present",
    ):
        assert re.search(expected, text), expected
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.parametrize("width", [240, 100, 80, 60])
def test_long_values_wrap_at_words_and_numbers_never(width):
    before, after = example_plan.example_plan(), example_plan.too_large()
    after["strategy"] += " | moments: V->data; " + "; ".join(f"{x}->none" for x in "ABCDEFGHIJ")
    after["collectives"][0]["layer"] += "/cross_attention/query_projection"
    after["notes"] = ["a note of many words " * 12]
    after["layers"].reverse()
    lines = printed(before, after, width)
    assert all(len(line) <= min(width, 100) for line in lines)
    text = "\n".join(lines)
    # Each of the words and numbers is whole, on one line.
    words = set(text.split())
    assert set(after["strategy"].split()) <= words
    assert re.search(r"^activations +2.22 GiB +16.2 GiB +x7.32$", text, re.MULTILINE)
    added = (
        r"^all-to-all over data .*query_projection\s+\(\w+\)\n"
        r"  only after   \d+ calls?, [\d,]+ bytes"
    )
    assert re.search(added, text, re.MULTILINE | re.DOTALL)


def test_equal_plans_are_reported():
    plan = example_plan.example_plan()
    assert printed(plan, plan) == ["Nothing changed."]
