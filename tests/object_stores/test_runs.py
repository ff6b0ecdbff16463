# tests: wings/object_stores/synced_folder.py, wings/object_stores/run_directory.py
# tests: wings/object_stores/checkpoints.py, training/run/logdir.py
"""Tests commands whose --logdir is in a bucket, as users type them."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.stores import path_of
from lingvo_gshard.training.run.checkpoint.orbax_storage import steps_in
from lingvo_gshard.training.run.checkpoint.run_item import read_run
from lingvo_gshard.wings.object_stores import buckets
from tests.object_stores.emulators import environment_with

pytestmark = pytest.mark.slow

_STEPS = 40
# Metrics of the machine.
_MEASURED = {"tokens_per_second", "host_memory_bytes"}


@pytest.fixture(scope="module")
def on_disk(corpus, tmp_path_factory):
    """Gives the directory of an undisturbed run on a disk."""
    logdir = tmp_path_factory.mktemp("disk") / "run"
    command("train", *corpus, f"--logdir={logdir}", f"--steps={_STEPS}")
    return logdir


def start(tool: str, *flags: str, environment: dict[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "lingvo_gshard", tool, *flags],
        env={**(environment or os.environ), "COLUMNS": "200"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, text: str = "", code: int = 0) -> tuple[str, str]:
    output, errors = process.communicate(text, timeout=540)
    assert process.returncode == code, (output, errors)
    return output, errors


def command(tool: str, *flags: str, emulator=None, text: str = "", code: int = 0):
    """Returns what a command prints to both streams."""
    environment = environment_with(emulator) if emulator else None
    return finish(start(tool, *flags, environment=environment), text, code)


def rows(logdir: str) -> list[dict]:
    lines = objects.read_bytes(f"{logdir}/metrics.jsonl").splitlines()
    return [{k: v for k, v in json.loads(x).items() if k not in _MEASURED} for x in lines]


def digests(logdir: str, step: int) -> dict:
    return read_run(path_of(f"{logdir}/checkpoints/{step}")).record.digests


def wait_for_step(folder: str, step: int, process: subprocess.Popen) -> None:
    while not any(one >= step for one in steps_in(path_of(f"{folder}/checkpoints"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)


def test_a_run_is_killed_resumes_and_is_used(corpus, on_disk, folder, emulator, tmp_path):
    flags = [*corpus, f"--logdir={folder}", f"--steps={_STEPS}"]
    process = start("train", *flags, environment=environment_with(emulator))
    wait_for_step(folder, 10, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    output, errors = command("train", *flags, emulator=emulator)
    assert "Resuming from the checkpoint of step" in output
    assert f"the run is in {folder}" in output
    assert "was stale and is taken over" in output + errors
    assert rows(folder) == rows(str(on_disk))
    assert digests(folder, _STEPS) == digests(str(on_disk), _STEPS)
    assert objects.names(folder) == [
        *("checkpoints", "compilations.jsonl", "events", "launches.jsonl", "metrics.jsonl"),
        *("params.txt", "sharding.json"),
    ]
    check_readers(folder, emulator, tmp_path)


def check_readers(folder: str, emulator, tmp_path: pathlib.Path) -> None:
    """Checks the commands that read a run."""
    output, _ = command("translate", f"--logdir={folder}", emulator=emulator, text="Hund\n")
    assert output.count("\n") == 1
    flags = (f"--logdir={folder}", "--beam_size=1", "--languages=de")
    output, _ = command("evaluate", *flags, emulator=emulator)
    assert "chrF" in output
    recorded = json.loads(objects.read_bytes(f"{folder}/evaluations.jsonl"))
    assert recorded["step"] == _STEPS
    page = tmp_path / "report.html"
    output, _ = command("report", f"--logdir={folder}", f"--html={page}", emulator=emulator)
    assert "Report on" in output and page.stat().st_size > 10_000
    exported = f"{folder}-exported"
    command(
        *("export", f"--logdir={folder}", f"--output={exported}", "--format=safetensors"),
        emulator=emulator,
    )
    assert any(name.endswith(".safetensors") for name in objects.find(exported))
    _, errors = command(
        *("export", f"--logdir={folder}", f"--output={exported}", "--format=safetensors"),
        emulator=emulator,
        code=1,
    )
    assert "exists and is not empty" in errors
    assert objects.local_folder(exported).is_dir()
    output, _ = command("train", f"--logdir={folder}", emulator=emulator)
    assert f"the run in {folder} has {_STEPS} steps already" in output


def test_a_second_run_is_refused(corpus, folder, emulator):
    flags = [*corpus, f"--logdir={folder}"]
    process = start("train", *flags, "--steps=100000", environment=environment_with(emulator))
    wait_for_step(folder, 10, process)
    _, errors = command("train", *flags, "--steps=100000", emulator=emulator, code=1)
    found = re.search(rf"--logdir={folder} is in use by process (\d+) on ", errors)
    assert found and int(found[1]) == process.pid
    process.send_signal(signal.SIGINT)
    output, _ = finish(process, code=130)
    assert "saved at step" in output
    assert steps_in(path_of(f"{folder}/checkpoints"))[-1] == len(rows(folder))


def test_a_run_starts_with_the_weights_of_one_in_a_bucket(corpus, folder, emulator, on_disk):
    for name in objects.find(on_disk):
        buckets.upload(on_disk / name, f"{folder}/first/{name}")
    objects.write_bytes(f"{folder}/first/checkpoints/{_STEPS}/commit_success.txt", b"")
    flags = [f"--init_from={folder}/first", f"--logdir={folder}/second", "--steps=3"]
    output, _ = command("train", *corpus, *flags, emulator=emulator)
    assert f"Starting from the weights of step {_STEPS} of {folder}/first" in output
    assert steps_in(path_of(f"{folder}/second/checkpoints")) == [3]
