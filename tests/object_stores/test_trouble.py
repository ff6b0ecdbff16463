# tests: wings/object_stores/problems.py, wings/object_stores/connections.py
# tests: wings/object_stores/checkpoints.py
"""Tests the one sentence that a command says when a bucket is in trouble."""

import os
import signal
import subprocess
import sys

import pytest

from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.stores import path_of
from lingvo_gshard.training.run.checkpoint.orbax_storage import steps_in
from tests.object_stores.emulators import environment_with


def start(emulator, *command: str) -> subprocess.Popen:
    environment = {**environment_with(emulator), "GSHARD_BUCKET_SECONDS": "4"}
    return subprocess.Popen(
        [sys.executable, "-m", "lingvo_gshard", *command],
        env={**environment, "COLUMNS": "300"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def error_of(emulator, *command: str) -> str:
    process = start(emulator, *command)
    _, errors = process.communicate(timeout=540)
    assert process.returncode == 1
    (line,) = [one for one in errors.splitlines() if "error:" in one]
    assert "Traceback" not in errors
    return line


@pytest.mark.slow
def test_a_bucket_that_is_not_there(emulator, corpus, folder):
    emulator.faults.is_gone = True
    words = f"--logdir={folder} cannot be read: there is no bucket {emulator.bucket}; check"
    assert words in error_of(emulator, "translate", f"--logdir={folder}")
    assert f"there is no bucket {emulator.bucket}" in error_of(
        emulator, "train", *corpus, f"--logdir={folder}", "--steps=2"
    )


@pytest.mark.slow
def test_a_token_that_is_refused(emulator, folder):
    emulator.faults.refuses = True
    line = error_of(emulator, "report", f"--logdir={folder}")
    assert f"{emulator.bucket} refuses access (" in line and "check the credentials" in line


def test_a_folder_without_a_run(emulator, folder):
    line = error_of(emulator, "translate", f"--logdir={folder}")
    assert f"--logdir={folder}: there is no such directory. Train one first" in line


@pytest.mark.slow
def test_a_bucket_that_vanishes_while_a_run_trains(emulator, corpus, folder):
    flags = [*corpus, f"--logdir={folder}", "--steps=100000"]
    process = start(emulator, "train", *flags)
    directory = path_of(f"{folder}/checkpoints")
    while not steps_in(directory):
        assert process.poll() is None, process.communicate()
    emulator.faults.is_gone = True
    warned = next(line for line in process.stdout if "could not be saved" in line)
    assert f"there is no bucket {emulator.bucket}; check its name" in warned
    # Steps of which the bucket has no row.
    assert any(line.startswith("step ") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=540)
    assert process.returncode == 1 and "Traceback" not in errors
    assert "could not be saved. Check the bucket" in errors
    kept = (output + errors).rpartition("lacks of the run's files is in ")[2].split()[0]
    assert "metrics.jsonl" in os.listdir(kept)
    emulator.faults.clear()
    last = steps_in(directory)[-1]
    again = start(emulator, "train", *corpus, f"--logdir={folder}", f"--steps={last + 5}")
    output, errors = again.communicate(timeout=540)
    assert again.returncode == 0, errors
    assert f"Resuming from the checkpoint of step {last}" in output
    assert objects.read_bytes(f"{folder}/metrics.jsonl").count(b"\n") == last + 5
