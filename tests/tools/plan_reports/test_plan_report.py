# tests: tools/plan_reports/plan_report.py, tools/console/tables.py
# tests: tools/plan_reports/memory_tables.py
"""Checks the report of gshard-plan."""

import io
import re

import pytest

from lingvo_gshard.tools.console import Console
from lingvo_gshard.tools.plan_reports import plan_report
from tests.planning import example_plan

WIDTH = 100


def printed(record):
    """Returns the lines that a console of 100 columns shows of a plan, given as JSON."""
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH)
    plan_report.print_plan(example_plan.as_plan(record), console)
    return stream.getvalue().splitlines()


def table_lines(lines):
    """Returns the lines of tables: those between a rule and the next empty line."""
    inside = False
    for line in lines:
        inside = line.startswith("───") or (inside and bool(line.strip()))
        if inside:
            yield line


def test_report_begins_with_whether_the_step_fits():
    lines = printed(example_plan.example_plan())
    assert (
        lines[0] == "It fits: peak 4.18 GiB of 16 GiB usable per device (26%), 11.8 GiB to spare."
    )
    lines = printed(example_plan.too_large())
    assert lines[0] == (
        "It does not fit: peak 18.2 GiB of 16 GiB usable per device (114%), 2.18 GiB too much."
    )
    assert any(re.search(r"batch_rows = 4096` +no +17 GiB +190 ms", line) for line in lines)


@pytest.mark.parametrize("strategy", example_plan.RULES)
def test_tables_fit_the_terminal_without_truncated_numbers(strategy):
    lines = printed(example_plan.example_plan(strategy))
    assert all(len(line) <= WIDTH for line in table_lines(lines))
    assert "…" not in "".join(lines)


def test_failed_suggestion_is_followed_by_its_reason():
    plan = example_plan.too_large()
    tried = {"change": "--strategy=expert_fsdp", "fits": False, "peak": None}
    plan["remedies"] = [{**tried, "seconds_per_step": None, "reason": "its compiler refuses it"}]
    lines = printed(plan)
    position = next(i for i, line in enumerate(lines) if line.startswith(tried["change"]))
    assert lines[position + 1].strip() == "its compiler refuses it"


def test_memory_is_listed_by_class():
    plan = example_plan.example_plan()
    text = "\n".join(printed(plan))
    assert re.search(r"^weights +1.8 GiB +11%", text, re.MULTILINE)
    assert re.search(r"^activations, temporaries +2.22 GiB +14%", text, re.MULTILINE)
    assert re.search(r"^unclassified +91.6 MiB", text, re.MULTILINE)
    plan["bytes_per_device"]["peak"] -= 2**30
    text = "\n".join(printed(plan))
    assert re.search(r"^not alive at the peak +-932 MiB", text, re.MULTILINE)


def test_omitted_rows_are_counted():
    plan = example_plan.example_plan()
    text = "\n".join(printed(plan))
    shown = sorted(plan["tensors"], key=lambda row: -row["bytes_per_device"])[:12]
    assert all(f"{row['path']} ({row['kind']})" in text for row in shown)
    assert re.search(r"^and 96 more, .*--json has them all", text, re.MULTILINE)
    held = sum(plan["bytes_per_device"][kind] for kind in ("weights", "moments"))
    assert re.search(rf"^all +1.8 GiB +33 MiB +{held / 2**30:.2f} GiB", text, re.MULTILINE)


def test_report_has_collectives_flops_time_and_budget():
    text = "\n".join(printed(example_plan.example_plan()))
    for expected in (
        r"all-to-all over data, float32 +8 MiB +6 +5.42 ms +0 s +7.74 ms +11%\n  encoder/layers/",
        r"all-to-all over data: 288 MiB a step +36 +32.5 ms +0 s +46.4 ms +66%",
        r"rematerialized +2.16 TFLOP +23%",
        r"decoder/layers/body_1/moe +backward +3 +18.8 ms +24.5 ms +9.3% +compute",
        r"A step of 1,048,576 tokens takes 264 ms \(estimate\), at least 156 ms \(bound,",
        r"3.79 steps/s \(estimate\), at most 6.41 \(bound\); 3.98 million tokens/s; MFU 40%",
        r"51.9 billion parameters, 492 million of them active per token",
        r"1 trillion tokens cost 17,883 chip-hours, 8,047 kWh, 39,342 USD",
        r"Compiled in 21.4 s; partitioner gspmd; lingvo_gshard 0.1.0, jax 0.10.2, libtpu 0.0.42.1",
        r"Note: decoder.embedding",
    ):
        assert re.search(expected, text), expected


def test_estimate_without_the_chips_compiler_is_labeled():
    plan = example_plan.example_plan() | {"compiler": "cpu"}
    assert "Compiled for CPU devices, not this chip" in "\n".join(printed(plan))


def test_plan_names_the_chips_own_compiler():
    lines = printed(example_plan.example_plan())
    assert "Compiled by libtpu 0.0.42.1, the compiler of TPU v3." in lines


def test_markup_in_names_is_escaped():
    plan = example_plan.hostile()
    plan["layers"][0]["layer"] = plan["tensors"][0]["path"] = "x[bold]y[/bold]"
    plan["layers"][0]["seconds"] = 1.0
    text = "\n".join(printed(plan))
    assert text.count("x[bold]y[/bold]") == 2 and example_plan.HOSTILE in text


def test_report_of_a_nearly_empty_plan():
    plan = example_plan.example_plan()
    for rows in ("tensors", "largest_temporaries", "collectives", "layers", "notes", "remedies"):
        plan[rows] = []
    plan.update(budget=None, mfu=None, seconds_per_step=0.0, steps_per_second=None, mesh="")
    text = "\n".join(printed(plan))
    assert "No collectives." in text and "keeps no weights or moments" in text


def test_collectives_have_hidden_and_exposed_time_with_their_line():
    record = example_plan.example_plan()
    for row in record["collectives"]:
        row |= {"seconds": 1e-3, "hidden_seconds": 0.0, "line": ""}
    record["collectives"][0] |= {"seconds": 2e-3, "hidden_seconds": 5e-3, "line": "layer.py:12"}
    lines = printed(record)
    first = next(i for i, line in enumerate(lines) if line.startswith("collective "))
    assert lines[first].split() == "collective one call calls bound hidden exposed share".split()
    assert "5 ms     2 ms" in lines[first + 2] and lines[first + 4].strip() == "layer.py:12"
    exposed = len(record["collectives"]) + 1
    assert (
        "Computation hides 5 ms of the communication; the step waits for the other "
        f"{exposed} ms." in lines
    )
