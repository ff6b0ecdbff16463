"""Checks that a spare goes on as `python -m MODULE` would have, and what becomes of others."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from lingvo_gshard.wings.agents.spare import Spare, module_of
from lingvo_gshard.wings.agents.worker import Worker, start_process

# Writes what a program can know of how it was started, and ends with an exit code of its own.
_PROGRAM = """
import json, os, sys
seen = [__name__, sys.argv, sys.path[0], os.environ["PLACE"], "json.tool" in sys.modules]
with open(os.environ["SEEN"], "w") as file:
    json.dump(seen, file)
sys.exit(7)
"""
MODULE = "spare_program"
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def spare(tmp_path, monkeypatch):
    """Returns a spare of the program, in a directory where the program is."""
    (tmp_path / f"{MODULE}.py").write_text(_PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PLACE", "before")
    found = Spare(MODULE, start_process, ["json.tool", "no_such_library"])
    yield found
    found.close()


def test_it_goes_on_as_the_program_would_have(spare, tmp_path):
    command = [sys.executable, "-m", MODULE, "--mesh=data=2", "a b", "\u00fc"]
    variables = {"PLACE": "after", "SEEN": str(tmp_path / "spare.json")}
    worker = Worker(command, variables, 3, lambda: None, spare)
    worker._process.wait()
    assert worker.outcome.code == 7
    worker.close()
    plain = {**os.environ, **variables, "SEEN": str(tmp_path / "plain.json")}
    assert subprocess.run(command, env=plain).returncode == 7
    seen, expected = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("spare", "plain")
    )
    assert seen == [*expected[:4], True]


def test_a_spare_that_has_died_is_no_worker(spare, tmp_path):
    os.kill(spare._process.pid, signal.SIGKILL)
    spare._process.wait()
    variables = {"SEEN": str(tmp_path / "seen.json")}
    worker = Worker([sys.executable, "-m", MODULE], variables, 3, lambda: None, spare)
    worker._process.wait()
    assert worker.outcome.code == 7 and (tmp_path / "seen.json").exists()
    worker.close()


def test_a_spare_of_another_module_ends(spare):
    assert spare.run([sys.executable, "-m", "another"], {}) is None
    assert spare._process.returncode == -signal.SIGKILL


def test_other_programs_have_no_spare():
    assert module_of([sys.executable, "-m", "lingvo_gshard", "train"]) == "lingvo_gshard"
    assert module_of([sys.executable, "train.py"]) is None
    assert module_of(["bash", "-m", "train"]) is None
