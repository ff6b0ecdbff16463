# tests: /examples/
"""Runs every directory of examples/ as a reader does: its run.sh, in a copy, made short."""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Directory -> what its run prints, and files that it leaves in $LOGDIR.
EXPECTED = {
    "cluster_job": ("Trained 3 steps", ("metrics.jsonl",)),
    "keras_model": ("plain Keras: loss", ("rows.weights.h5", "checkpoints")),
    "own_router": ("Trained 3 steps", ("metrics.jsonl",)),
    "own_task": ("accuracy", ("metrics.jsonl", "plan.json")),
    "plan_any_program": ("all-reduce", ("plan.json", "plan.html")),
}
SHORT = {"STEPS": "3", "EPOCHS": "2"}


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.fixture
def environment(tmp_path):
    """The environment of a reader: the commands of this package on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("train", "evaluate", "plan"):
        command = folder / f"gshard-{tool}"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lingvo_gshard {tool} "$@"\n')
        command.chmod(0o755)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return {
        **outer,
        **SHORT,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "LOGDIR": str(tmp_path / "run"),
        "PORT": str(free_port()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs(name, tmp_path, environment):
    copy = shutil.copytree(EXAMPLES / name, tmp_path / name)
    result = subprocess.run(
        [copy / "run.sh"], env=environment, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stdout + result.stderr
    printed, files = EXPECTED[name]
    assert printed in result.stdout
    assert all((tmp_path / "run" / file).exists() for file in files)


def test_every_example_is_listed_and_has_a_page():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert folders == set(re.findall(r"^\| \[(\w+)\]", listed, re.MULTILINE)) == set(EXPECTED)
    for name in folders:
        page = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
        assert "./run.sh" in page
        for target in re.findall(r"\]\((\.\./[^)#]+)", page):
            assert (EXAMPLES / name / target).exists(), target
