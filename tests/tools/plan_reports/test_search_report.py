"""Runs gshard-plan --search from the command line."""

import json
import shlex

import pytest

from lingvo_gshard.tools import plan
from lingvo_gshard.tools.console import startup
from tests.tools.tiny_quickstart import FLAGS as TINY


def run(capsys, *flags):
    """Returns (exit code, standard output, standard error)."""
    capsys.readouterr()
    code = startup.guarded(plan.NAME, plan.main)([plan.NAME, *map(str, flags)])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_printed_flags_reproduce_the_best_candidate(capsys, tmp_path):
    found, again = tmp_path / "found.json", tmp_path / "again.json"
    flags = (*TINY, "--topology=cpu:8")
    searching = ("--search", "--search_compilations=1", f"--json={found}")
    code, out, err = run(capsys, *flags, *searching)
    record = json.loads(found.read_text())
    best = record["best"]
    assert code == 0 and "compiling --mesh=" in err
    assert {row["name"] for row in record["baselines"]} >= {"data", "expert", "fsdp", "tensor"}
    assert best["compiled"]["seconds"] == record["plan"]["seconds_per_step"]
    assert all(shlex.quote(flag) in out for flag in best["flags"])
    code, _, err = run(capsys, *flags, *best["flags"], f"--json={again}")
    assert code == 0, err
    planned = json.loads(again.read_text())
    for part in ("seconds_per_step", "bytes_per_device", "mesh", "strategy"):
        assert planned[part] == record["plan"][part]


@pytest.mark.parametrize("flag", ["--mesh=data=8", "--strategy=expert"])
def test_searched_settings_cannot_be_given_as_flags(capsys, flag):
    code, _, err = run(capsys, *TINY, "--topology=cpu:8", "--search", flag)
    assert code == 1
    assert flag.split("=")[0] in err and "--search" in err


@pytest.mark.slow
def test_cost_model_decides_without_compilations(capsys, tmp_path):
    found = tmp_path / "found.json"
    flags = (*TINY, "--topology=v3:2x2", "--search", "--search_compilations=0", f"--json={found}")
    code, out, _ = run(capsys, *flags)
    record = json.loads(found.read_text())
    assert code == 0 and record["plan"] is None and record["best"]["compiled"] is None
    assert "named strategies, by the cost model" in out
