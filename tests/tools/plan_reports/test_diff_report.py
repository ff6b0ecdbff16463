"""Checks the report of gshard-plan diff."""

import io
import re

import rich.console

from lingvo_gshard.planning.plan import diff
from lingvo_gshard.tools.plan_reports import diff_report
from tests.planning import example_plan

WIDTH = 100


def printed(before, after):
    """Returns the lines that a console of 100 columns shows of the changes."""
    stream = io.StringIO()
    changes = diff.diff(example_plan.as_plan(before), example_plan.as_plan(after))
    diff_report.print_diff(changes, rich.console.Console(file=stream, width=WIDTH))
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
    assert all(len(line) <= WIDTH for line in lines)


def test_equal_plans_are_reported():
    plan = example_plan.example_plan()
    assert printed(plan, plan) == ["Nothing changed."]
