# tests: tools/plan_reports/goodput_report.py, tools/flags/goodput.py
"""Runs gshard-plan --goodput on the file of a plan: report, JSON and mistakes."""

import json

import pytest

from lingvo_gshard.tools import plan
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.plan_reports.goodput_report import duration
from tests.planning import example_plan


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Returns a function that runs gshard-plan beside plan.json, as (code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    record = example_plan.example_plan() | {"topology": "gpu:h100:2048x8"}
    (tmp_path / "plan.json").write_text(json.dumps(record))

    def call(*flags):
        capsys.readouterr()
        code = startup.guarded(plan.NAME, plan.main)([plan.NAME, *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_report_and_json_of_a_whole_training(run):
    flags = ["--plan=plan.json", "--goodput", "--tokens=1e13", "--simulated_runs=200"]
    code, out, err = run(*flags, "--json=whole.json", "--html=whole.html")
    assert code == 0 and err == ""
    for words in (
        "The whole training: ",
        "A chip of 16,384 fails every 3.09 h",
        "run.checkpoint_every_steps = ",
        "200 simulated runs",
        "with the published rate",
        "between two failures of a chip (--failures): 50,677 chip-hours; Llama 3 405B",
        "Goodput depends most on --",
    ):
        assert words in out
    with open("whole.json") as file:
        whole = json.load(file)["goodput"]
    assert whole["tokens"] == 1e13 and whole["runs"] == 200
    assert abs(whole["goodput"]["mean"] / whole["formula_goodput"] - 1) < 0.01
    code, out, _ = run("diff", "plan.json", "whole.json")
    assert code == 0 and "goodput.formula_goodput" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--goodput"], "--goodput needs --tokens, the tokens to train on, such as 1e12"),
        (["--failures=llama3"], "--failures=llama3 applies to --goodput, which is not given"),
        (["--goodput", "--tokens=1e9", "--failures=lama"], "Did you mean 'llama3'?"),
        (["--goodput", "--tokens=0"], "--tokens=0.0: expected a number of tokens"),
        (
            ["--goodput", "--tokens=1e9", "--checkpoint_rate=0"],
            "--checkpoint_rate=0.0: ",
        ),
        (["--goodput", "--tokens=1e9", "--simulated_runs=0"], "--simulated_runs=0: "),
        (["--goodput", "--tokens=1e9", "--topology=cpu:8"], "does not apply to --plan=plan.json"),
        (["--goodput", "--tokens=1e9", "--search"], "does not apply to --goodput"),
        (["--goodput", "--tokens=1e9", "--plan=none.json"], "none.json: cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(run, flags, words):
    code, out, err = run("--plan=plan.json", *flags)
    assert code == 1 and out == "" and err.count("\n") == 1
    assert words in err


def test_durations_have_the_largest_unit():
    assert [duration(seconds) for seconds in (0.2, 59, 90, 7200, 172_800)] == [
        *("200 ms", "59 s", "1.5 min", "2 h", "2 days"),
    ]
