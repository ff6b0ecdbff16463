# tests: tools/launch/ray.py, wings/agents/ray_meeting.py
"""Runs jobs on a real Ray cluster of a head and two nodes for hosts."""

import contextlib
import json
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.agents import stand_in
from tests.agents.stand_in import number_after
from tests.tools import tiny_translation
from tests.tools.launch import ray_cluster
from tests.tools.launch.test_train_with_failures import (
    _SETTINGS,
    _STEPS,
    check_equal,
    wait_for_steps,
)

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

_LAUNCH = [sys.executable, "-m", "lingvo_gshard", "launch", "ray"]
_OPTIONS = [f"--resource={ray_cluster.RESOURCE}", "--beat_seconds=0.5", "--lost_seconds=20"]
_PATIENCE = 300.0
# Workers of a training import, trace and compile on one core each, which they may share.
_LONG_PATIENCE = 1200.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    # A short name: paths of Ray's sockets have at most 107 characters.
    with ray_cluster.running(tmp_path_factory.mktemp("r"), nodes=2) as cluster:
        yield cluster


def end(process: subprocess.Popen, code: int = 0, patience: float = _PATIENCE) -> str:
    said, _ = process.communicate(timeout=patience)
    assert process.returncode == code, said
    return said


class StandIns:
    """A job of workers that start in no time."""

    def __init__(self, cluster, folder: pathlib.Path, *options: str, steps: int = 40, faults=""):
        self.folder = folder
        worker = [sys.executable, "-S", stand_in.__file__, str(folder), str(steps), faults]
        worker += [f"--logdir={folder}", f"--mesh=data={options[0].partition('=')[2]}"]
        self.process = cluster.run(*_LAUNCH, *_OPTIONS, *options, "--", *worker)

    @property
    def saved(self) -> list:
        return json.loads((self.folder / "saved.json").read_text())

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not (self.folder / "saved.json").exists() or self.saved[0] < step:
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_worker_changes_no_result(cluster, tmp_path):
    job = StandIns(cluster, tmp_path, "--max_hosts=2", faults="1:17:kill")
    said = end(job.process)
    assert job.saved == [40, number_after(40)]
    assert re.search(r"Round 1: 127.0.0.\d-., 127.0.0.\d-., mesh data=2", said)
    assert re.search(r"Round 2 after \S+ was killed by SIGKILL \(after step 16\)", said)


@pytest.mark.slow
def test_with_fewer_nodes_than_hosts_a_job_waits_and_says_so(cluster, tmp_path):
    options = ["--max_hosts=3", "--join_seconds=4"]
    said = end(StandIns(cluster, tmp_path, *options).process, code=1)
    room = "Ray's living nodes, 3, have room for 2 hosts with CPU=1, host=1"
    assert f"Waiting for 3 hosts: {room}\n" in said
    assert f"--max_hosts=3: for 4 s, 3 hosts were waited for. {room}." in said


@pytest.mark.slow
def test_a_job_starts_on_fewer_hosts_if_these_are_enough(cluster, tmp_path):
    options = ["--max_hosts=4", "--min_hosts=2", "--gather_seconds=2"]
    job = StandIns(cluster, tmp_path, *options)
    said = end(job.process)
    assert job.saved == [40, number_after(40)] and "mesh data=2" in said


@pytest.mark.slow
def test_ctrl_c_saves(cluster, tmp_path):
    job = StandIns(cluster, tmp_path, "--max_hosts=2", steps=10_000)
    job.wait_for_step(10)
    job.process.send_signal(signal.SIGINT)
    end(job.process, code=130)
    step, number = job.saved
    assert 10 <= step < 10_000 and number == number_after(step)


@pytest.mark.slow
def test_a_lost_node_is_done_without_if_enough_are_left(cluster, tmp_path):
    options = ["--max_hosts=2", "--min_hosts=1", "--regather_seconds=1"]
    job = StandIns(cluster, tmp_path, *options, steps=400)
    job.wait_for_step(10)
    cluster.kill(3)
    try:
        said = end(job.process)
    finally:
        cluster.start(3)
    assert job.saved == [400, number_after(400)]
    assert "gives no sign of life" in said and "127.0.0.2-" in said and "mesh data=1" in said


@pytest.mark.slow
def test_a_submitted_job_goes_on_after_a_stop_and_on_another_node(cluster, tmp_path):
    worker = [sys.executable, "-S", stand_in.__file__, str(tmp_path), "1500", ""]
    worker += [f"--logdir={tmp_path}", "--mesh=data=2"]
    launch = [*_LAUNCH, *_OPTIONS, "--max_hosts=2", "--dry_run", "--", *worker]
    job = StandIns.__new__(StandIns)
    job.folder, command = tmp_path, shlex.split(end(cluster.run(*launch)))
    job.process = cluster.run(*command)
    job.wait_for_step(20)
    end(cluster.run("ray", "job", "stop", number_of(job.process)))
    job.process.communicate(timeout=_PATIENCE)
    step, number = job.saved
    assert 20 <= step < 1500 and number == number_after(step)
    job.process = cluster.run(*command)
    job.wait_for_step(step + 20)
    cluster.kill(3)
    cluster.start(4)
    said = end(job.process)
    cluster.kill(4)
    cluster.start(3)
    assert job.saved == [1500, number_after(1500)]
    assert re.search(r"Round 2 after .*127\.0\.0\.4-\d.*, mesh data=2", said), said


def number_of(process: subprocess.Popen) -> str:
    """Returns the submission's number, which a `ray job submit` prints."""
    said = ""
    while not (found := re.search(r"Job '(\w+)' submitted", said)):
        said += process.stdout.readline()
    return found[1]


class Training:
    """A training of two hosts, submitted as --dry_run prints it."""

    def __init__(self, cluster, flags: list[str], logdir: pathlib.Path, cache: pathlib.Path):
        worker = ["gshard-train", *flags, f"--logdir={logdir}", f"--steps={_STEPS}"]
        worker += ["--mesh=data=2", "--strategy=expert", f"--compilation_cache={cache}"]
        launch = [
            *_LAUNCH,
            *_OPTIONS,
            "--max_hosts=2",
            "--nospare",
            "--lost_seconds=60",
            "--save_seconds=600",
            "--dry_run",
            "--",
            *worker,
        ]
        self.cluster, self.logdir = cluster, logdir
        self.command = shlex.split(end(cluster.run(*launch)))
        assert self.command[:3] == ["ray", "job", "submit"]

    def start(self) -> subprocess.Popen:
        return self.cluster.run(*self.command)

    def suspend(self, process: subprocess.Popen, step: int) -> list[psutil.Process]:
        """Suspends the workers after a step, since their next ones take milliseconds."""
        wait_for_steps(self.logdir, step, process, _LONG_PATIENCE)
        found = [
            one
            for one in psutil.process_iter(["cmdline"])
            if f"--logdir={self.logdir}" in (words := one.info["cmdline"] or [])
            and any(word.startswith("--process_id=") for word in words)
        ]
        assert len(found) == 2
        for worker in found:
            worker.suspend()
        return found

    def stop(self, process: subprocess.Popen, workers: list[psutil.Process]) -> str:
        """Stops the job, whose workers are suspended. Returns the job's log."""
        number = number_of(process)
        stopping = self.cluster.run("ray", "job", "stop", number)
        deadline = time.monotonic() + _PATIENCE
        while not all(map(is_asked_to_stop, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for worker in workers:
            worker.resume()
        end(stopping, patience=_LONG_PATIENCE)
        process.communicate(timeout=_LONG_PATIENCE)
        return end(self.cluster.run("ray", "job", "logs", number))


def is_asked_to_stop(process: psutil.Process) -> bool:
    """Returns whether SIGTERM waits for a suspended process, by proc_pid_status(5)."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    waiting = int(re.search(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    return bool(waiting & 1 << (signal.SIGTERM - 1))


def checkpoints(logdir: pathlib.Path) -> list[int]:
    return [int(path.name) for path in (logdir / "checkpoints").iterdir() if path.name.isdigit()]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_lost_and_replaced_node_and_a_stopped_job_change_no_bit(cluster, tmp_path):
    own = {"run__checkpoint_every_steps": 0, "run__routers__every_steps": 0}
    flags = tiny_translation.write(tmp_path, **_SETTINGS | own, run__keep_programs=True)
    cache, calm, stormy = tmp_path / "cache", tmp_path / "calm", tmp_path / "stormy"
    said = end(Training(cluster, flags, calm, cache).start(), patience=_LONG_PATIENCE)
    assert "Round 1: " in said and "kills this job" not in said
    job = Training(cluster, flags, stormy, cache)
    process = job.start()
    said = job.stop(process, job.suspend(process, 3))
    (saved,) = checkpoints(stormy)
    assert 3 <= saved < _STEPS, said
    process = job.start()
    workers = job.suspend(process, 9)
    cluster.kill(3)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()
    cluster.start(4)
    said = end(process, patience=_LONG_PATIENCE)
    assert re.search(r"Round 2 after .*127\.0\.0\.4-\d.*, mesh data=2", said), said
    check_equal(stormy, calm)
