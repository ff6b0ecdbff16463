"""Starts gshard-train in one subprocess or two."""

import json
import os
import pathlib
import socket
import subprocess
import sys


def start(flags: list[str], devices: int) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        [sys.executable, "-m", "lingvo_gshard", "train", *flags],
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


def start_two(flags: list[str]) -> list[subprocess.Popen]:
    meeting = [f"--coordinator=localhost:{free_port()}", "--num_processes=2"]
    return [start([*flags, *meeting, f"--process_id={i}"], devices=4) for i in range(2)]


def train_in_two(flags: list[str]) -> list[str]:
    return [finish(process) for process in start_two(flags)]


def run_in_two(flags: list[str]) -> list[tuple[int, str]]:
    """Returns the exit codes and outputs of two processes."""
    processes = start_two(flags)
    outputs = [process.communicate(timeout=540)[0] for process in processes]
    return [(p.returncode, output) for p, output in zip(processes, outputs, strict=True)]
