"""gshard-train in two processes of four devices: as in one of eight, and from there to anywhere."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests.tools import tiny_translation

_SETTINGS = {
    "input__batch_rows": 8,
    "input__source_length": 32,
    "input__target_length": 32,
    "task__encoder__moe__group_size": 32,
    "task__decoder__moe__group_size": 32,
    "trainer__checkpoint_every_steps": 3,
}


def start(flags: list[str], devices: int) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        [sys.executable, "-m", "lingvo_gshard.tools.train", *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=540)
    assert process.returncode == 0, output
    return output


def losses(logdir: pathlib.Path) -> list[float]:
    lines = (logdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def train_in_two(flags: list[str]) -> list[str]:
    meeting = [f"--coordinator=localhost:{free_port()}", "--num_processes=2"]
    processes = [start([*flags, *meeting, f"--process_id={i}"], devices=4) for i in range(2)]
    return [finish(process) for process in processes]


@pytest.mark.slow
def test_two_processes_train_as_one_and_leave_off_anywhere(tmp_path):
    flags = tiny_translation.write(tmp_path, **_SETTINGS)
    mesh = ["--mesh=data=8", "--strategy=expert"]
    alone, together = tmp_path / "alone", tmp_path / "together"

    finish(start([*flags, *mesh, f"--logdir={alone}", "--steps=6"], devices=8))
    main, other = train_in_two([*flags, *mesh, f"--logdir={together}", "--steps=4"])
    assert "Trained 4 steps" in main and "step" not in other
    finish(start([*flags, f"--logdir={together}", "--mesh=data=2,model=2", "--steps=5"], 4))
    finish(start([*flags, f"--logdir={together}", "--runtime=local", "--steps=6"], 1))

    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    assert len(losses(together)) == 6
