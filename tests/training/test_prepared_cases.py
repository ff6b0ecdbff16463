# tests: /docs/debugging.md, /docs/trust.md, wings/services/determinism.py
# tests: wings/services/divergence.py
"""Runs broken cases of two pages: spikes, a stuck input and a step that is not one."""

import pathlib
import subprocess

import pytest

from tests.test_docs import ROOT, commands, environment, with_tiny_flags, write_files

NAMES = ("debugging.md", "trust.md")
PAGES = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in NAMES)

__all__ = ["environment"]  # A fixture.


def run(case: str, folder: pathlib.Path, variables: dict[str, str]) -> str:
    """Runs the command of a case and returns its output."""
    write_files(PAGES, folder)
    (command,) = [line for line in commands(PAGES) if case in line and "gshard-train" in line]
    done = subprocess.run(
        ["bash", "-c", with_tiny_flags(command)],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )
    return done.stdout


@pytest.mark.slow
def test_spikes_are_rolled_back(tmp_path, environment):
    output = run("broken_inputs.spiking", tmp_path, environment)
    assert "Warning: step 35 is a spike, and its update was discarded: loss " in output
    assert "Warning: steps 35 to 39 are spikes: loss " in output
    assert (
        "Rolling back to step 29, from the checkpoint of step 20, and skipping batches 30 to 44\n"
        in output
    )
    assert "Trained 60 steps" in output and "roll backs: 1 (roll_backs.jsonl has each)" in output


@pytest.mark.slow
def test_a_stuck_input_is_named_with_its_line(tmp_path, environment):
    output = run("broken_inputs.stuck", tmp_path, environment)
    text = (tmp_path / "broken_inputs.py").read_text()
    line = 1 + next(n for n, code in enumerate(text.splitlines()) if "time.sleep(3600)" in code)
    assert (
        f"training is stuck: it waits for the batch of step 20, at {tmp_path}/broken_inputs.py:"
        f"{line} (block); no step has ended for " in output
    )
    assert output.endswith("exit code 1\n")


@pytest.mark.slow
def test_a_layer_that_is_no_function_of_the_step_is_found(tmp_path, environment):
    output = run("unsteady.experiment", tmp_path, environment)
    assert (
        "step 5: it was computed twice from the same state, and differs on the device: " in output
    )
    assert (
        "As most tensors differ, the program may not be deterministic: a layer may draw" in output
    )
    assert output.endswith("exit code 1\n")
