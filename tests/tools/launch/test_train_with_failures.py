# tests: tools/launch/local.py, tools/launch/agent.py, wings/agents/agent.py
# tests: wings/services/snapshot_parts.py
"""Checks that a training whose processes are killed equals one without failures, to the bit."""

import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import pytest

from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.wings.services.snapshot_parts import Part
from tests.agents.test_agents import children
from tests.tools import tiny_translation
from tests.tools.train.train_processes import losses

_STEPS = 16
_SETTINGS = {
    "input__batch_rows": 8,
    "input__source_length": 32,
    "input__target_length": 32,
    "task__encoder__moe__group_size": 32,
    "task__decoder__moe__group_size": 32,
    "run__checkpoint_every_steps": 4,
}


def start(
    flags: list[str],
    logdir: pathlib.Path,
    cache: pathlib.Path,
    *more: str,
    kind: Sequence[str] = ("local", "--hosts=2"),
) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-m", "lingvo_gshard", "launch", *kind, "--"]
    worker = ["gshard-train", *flags, f"--logdir={logdir}", f"--steps={_STEPS}"]
    worker += ["--mesh=data=4", "--strategy=expert", f"--compilation_cache={cache}", *more]
    pipe, same = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command + worker, env=environment, stdout=pipe, stderr=same, text=True)


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=540)
    assert process.returncode == 0, said
    return said


def kill_after(
    launcher: subprocess.Popen, logdir: pathlib.Path, step: int, process: int, forget: bool = False
) -> None:
    """Kills a worker when a step is done.

    Args:
      launcher: of two hosts.
      logdir: of the training.
      step: the number of steps that are done before.
      process: number of the worker.
      forget: also deletes the snapshots of its host, once the other host has a copy.
    """
    wait_for_steps(logdir, step, launcher)
    (agent,) = children(launcher.pid, f"--host=local-{process}")[:1]
    worker = worker_of(agent)
    if forget:
        # These steps take milliseconds, and agents copy snapshots once a second.
        os.kill(worker, signal.SIGSTOP)
        folder = wait_for_copy(logdir, f"local-{process}", f"local-{1 - process}", process)
    os.kill(worker, signal.SIGKILL)
    if forget:
        for part in folder.iterdir():
            part.unlink()


def worker_of(agent: int) -> int:
    """Returns the process that trains: the older one, if a spare waits beside it."""
    return children(agent, "")[0]


def wait_for_copy(logdir: pathlib.Path, host: str, partner: str, process: int) -> pathlib.Path:
    """Waits until a partner has the newest part of a host, and returns the host's folder."""
    own, other = (
        pathlib.Path("/dev/shm", f"gshard-{job_of(logdir)}-{name}") for name in (host, partner)
    )
    deadline = time.monotonic() + 60
    while True:
        parts = [part for part in Part.within(own) if part.index == process]
        if parts and parts[-1] in Part.within(other):
            return own
        assert time.monotonic() < deadline, f"{partner} has no copy of {parts[-1:]}"
        time.sleep(0.1)


def state_of(logdir: pathlib.Path) -> dict[str, np.ndarray]:
    checkpoint = CheckpointStore(logdir / "checkpoints", writable=False).restore()
    assert checkpoint is not None and checkpoint.step == _STEPS
    return {
        f"{part}.{k}": v for part in checkpoint.arrays for k, v in checkpoint.arrays[part].items()
    }


@pytest.mark.slow
def test_kill_9_of_either_worker_changes_no_bit(tmp_path):
    flags = tiny_translation.write(tmp_path, **_SETTINGS)
    cache, calm, stormy = tmp_path / "cache", tmp_path / "calm", tmp_path / "stormy"
    finish(start(flags, calm, cache))
    launcher = start(flags, stormy, cache)
    kill_after(launcher, stormy, 6, process=1)
    kill_after(launcher, stormy, 11, process=0)
    said = finish(launcher)
    assert "Round 2 after" in said and "Round 3 after" in said, said
    assert "was killed by SIGKILL" in said
    check_equal(stormy, calm)


@pytest.mark.slow
def test_snapshots_in_memory_are_restored_also_from_the_partner(tmp_path):
    """The second host loses its memory with its worker; there is no checkpoint."""
    flags = tiny_translation.write(tmp_path, **{**_SETTINGS, "run__checkpoint_every_steps": 0})
    cache, calm, stormy = tmp_path / "cache", tmp_path / "calm", tmp_path / "stormy"
    every = "--gin_param=run.snapshot_every_steps = 3"
    finish(start(flags, calm, cache))
    launcher = start(flags, stormy, cache, every)
    kill_after(launcher, stormy, 8, process=0)
    kill_after(launcher, stormy, 14, process=1, forget=True)
    said = finish(launcher)
    assert "Round 2 after" in said and "Round 3 after" in said, said
    assert said.count("Resuming from the snapshot of step") == 2, said
    check_equal(stormy, calm)
    assert not list(pathlib.Path("/dev/shm").glob(f"gshard-{job_of(stormy)}-*"))


@pytest.mark.slow
def test_one_host_goes_on_with_a_smaller_mesh(tmp_path):
    """The leading host is lost for good: the batch and its order stay, half of the devices go."""
    flags = tiny_translation.write(tmp_path, **_SETTINGS)
    cache, calm, alone = tmp_path / "cache", tmp_path / "calm", tmp_path / "alone"
    finish(start(flags, calm, cache))
    lost, other = (start_agent(flags, alone, cache, host) for host in "ab")
    wait_for_steps(alone, 6, other)
    lost.kill()
    said = finish(other)
    assert "after a gives no sign of life" in said and "b, mesh data=2" in said, said
    assert losses(alone) == pytest.approx(losses(calm), rel=1e-5)


@pytest.mark.slow
def test_one_host_goes_on_from_the_snapshot_of_two(tmp_path):
    """The leading host is lost for good, and there is no checkpoint."""
    flags = tiny_translation.write(tmp_path, **{**_SETTINGS, "run__checkpoint_every_steps": 0})
    cache, calm, alone = tmp_path / "cache", tmp_path / "calm", tmp_path / "alone"
    every = "--gin_param=run.snapshot_every_steps = 3"
    finish(start(flags, calm, cache))
    lost, other = (start_agent(flags, alone, cache, host, every) for host in "ab")
    wait_for_steps(alone, 11, other)
    os.kill(worker_of(lost.pid), signal.SIGSTOP)
    wait_for_copy(alone, "a", "b", process=0)
    lost.kill()
    said = finish(other)
    assert "after a gives no sign of life" in said and "b, mesh data=2" in said, said
    assert "Resuming from the snapshot of step" in said, said
    assert losses(alone) == pytest.approx(losses(calm), rel=1e-5)
    assert not list(pathlib.Path("/dev/shm").glob(f"gshard-{job_of(alone)}-*"))


def wait_for_steps(
    logdir: pathlib.Path, step: int, process: subprocess.Popen, patience: float = 300.0
) -> None:
    deadline = time.monotonic() + patience
    while not (logdir / "metrics.jsonl").exists() or len(losses(logdir)) < step:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def start_agent(
    flags: list[str], logdir: pathlib.Path, cache: pathlib.Path, host: str, *more: str
) -> subprocess.Popen:
    options = [f"--host={host}", "--address=127.0.0.1", "--max_hosts=2", "--min_hosts=1"]
    return start(flags, logdir, cache, *more, kind=["agent", *options, "--lost_seconds=10"])


def job_of(logdir: pathlib.Path) -> str:
    return hashlib.sha256(f"{logdir}/agents".encode()).hexdigest()[:16]


def check_equal(one: pathlib.Path, other: pathlib.Path) -> None:
    assert losses(one) == losses(other)
    expected, found = state_of(other), state_of(one)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
