# tests: tools/plan_reports/goodput_report.py, wings/planning/training/budget/search.py
"""Runs gshard-plan --budget: report, JSON and mistakes."""

import json

import pytest

from lingvo_gshard.tools import plan
from lingvo_gshard.tools.console import startup

FLAGS = ["--budget=2e5", "--topology=gpu:h100:16x8,v5e:8x8"]


def run(capsys, *flags):
    """Returns (exit code, standard output, standard error)."""
    capsys.readouterr()
    code = startup.guarded(plan.NAME, plan.main)([plan.NAME, *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_report_says_what_to_train_and_what_decides(capsys, tmp_path):
    code, out, err = run(capsys, *FLAGS, f"--json={tmp_path}/budget.json")
    record = json.loads((tmp_path / "budget.json").read_text())
    assert code == 0 and err == ""
    best = record["best"]
    assert out.startswith("For 200,000 USD: ") and f"on {best['topology']} in " in out
    for words in (
        "best on each chip",
        "best with each number of experts",
        "smaller and larger models",
        "What decides the machine: ",
        "What decides the size: ",
        "the law fine_grained",
        "Note: extrapolated: the law joint was fitted to models of up to 2.7e+09 active",
        "MFU with experts (--mfu): 35%",
    ):
        assert words in out
    assert len(record["machines"]) == 2 and record["law"] == "joint"


def test_flags_of_failures_apply_to_budgets(capsys):
    code, out, _ = run(capsys, *FLAGS, "--failures=opt", "--restart=60", "--mfu=0.3")
    assert code == 0 and "restart (--restart): 1 min; --restart" in out
    assert "MFU of dense models (--mfu): 30%; --mfu" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--budget=0"], "--budget=0: expected more than 0, such as 1e6 USD"),
        (["--budget=1e6", "--mfu=2"], "--mfu=2: expected more than 0 and at most 1"),
        (["--budget=1e6", "--law=join"], "Did you mean 'joint'?"),
        (["--budget=1e6", "--topology=h100:1x8"], "--topology=h100:1x8: unknown kind of chip"),
        (["--budget=1e6", "--topology=cpu:8"], "--topology=cpu:8: no price of"),
        (
            ["--budget=1e6", "--goodput", "--tokens=1e9"],
            "--goodput does not apply to --budget",
        ),
        (["--budget=1e6", "--simulated_runs=5"], "--simulated_runs=5 applies to --goodput"),
        (["--law=joint"], "--law=joint applies to --budget, which is not given"),
    ],
)
def test_mistakes_are_one_sentence(capsys, flags, words):
    code, out, err = run(capsys, *flags)
    assert code == 1 and out == "" and err.count("\n") == 1
    assert words in err
