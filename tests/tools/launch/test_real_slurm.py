# tests: tools/launch/slurm.py
"""Submits jobs to a real Slurm with two nodes, with workers that start in no time."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.agents import stand_in
from tests.agents.stand_in import number_after
from tests.tools.launch import slurm_cluster

ROOT = pathlib.Path(__file__).resolve().parents[3]
_FAST = ["--beat_seconds=0.2", "--lost_seconds=3", "--regather_seconds=2", "--stop_seconds=20"]
_PATIENCE = 240.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    problem = slurm_cluster.problem()
    if problem:
        pytest.skip(problem)
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


class Job:
    """A job whose launcher follows it."""

    def __init__(self, slurm, folder: pathlib.Path, *options: str, steps=40, faults=""):
        self.slurm, self.folder = slurm, folder
        # With fewer, a job that is content with one node would start on one.
        slurm.wait_for_nodes()
        worker = [sys.executable, "-S", stand_in.__file__, str(folder), str(steps), faults]
        command = [sys.executable, "-m", "lingvo_gshard", "launch", "slurm", "--max_hosts=2"]
        command += [*_FAST, *options, f"--meeting_place={folder}/agents"]
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        self.launcher = subprocess.Popen(
            [*command, "--", *worker, "--mesh=data=2"],
            env={**slurm.environment, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def saved(self) -> list:
        return json.loads((self.folder / "saved.json").read_text())

    @property
    def number(self) -> str:
        return self.slurm.run("squeue", "-h", "-o", "%i")

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not (self.folder / "saved.json").exists() or self.saved[0] < step:
            assert time.monotonic() < deadline and self.launcher.poll() is None
            time.sleep(0.05)

    def finish(self) -> str:
        said, _ = self.launcher.communicate(timeout=_PATIENCE)
        assert self.launcher.returncode == 0, said
        return said


@pytest.mark.slow
def test_a_job_trains_on_both_nodes_and_survives_its_workers(slurm, tmp_path):
    said = Job(slurm, tmp_path, faults="1:17:kill").finish()
    (saved,) = [json.loads((tmp_path / "saved.json").read_text())]
    assert saved == [40, number_after(40)]
    assert "Round 1: n1, n2, mesh data=2" in said
    assert "Round 2 after n2 was killed by SIGKILL (after step 16)" in said


def end_as_the_time_limit_does(slurm, number: str) -> None:
    """Signals a job as Slurm does some time before its limit, and waits until it is queued."""
    slurm.run("scancel", "--signal=USR1", "--batch", number)
    deadline = time.monotonic() + 60
    while slurm.run("squeue", "-h", "-o", "%T") != "PENDING":
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_a_job_saves_before_its_time_limit_and_is_queued_again(slurm, tmp_path):
    job = Job(slurm, tmp_path, steps=200)
    job.wait_for_step(10)
    number = job.number
    end_as_the_time_limit_does(slurm, number)
    step, value = job.saved
    assert 10 <= step < 200 and value == number_after(step)
    # Slurm itself waits two minutes before a job runs again.
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    said = job.finish()
    assert job.saved == [200, number_after(200)]
    assert said.count("mesh data=2") == 2 and "killed" not in said


@pytest.mark.slow
def test_a_drained_node_finishes_its_part_and_the_job_goes_on_without_it(slurm, tmp_path):
    job = Job(slurm, tmp_path, "--min_hosts=1", "--gather_seconds=3", steps=400)
    job.wait_for_step(10)
    slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        # A drained node gets no new job, and keeps the one that it has.
        job.wait_for_step(job.saved[0] + 50)
        number = job.number
        end_as_the_time_limit_does(slurm, number)
        step, value = job.saved
        assert 60 <= step < 400 and value == number_after(step)
        # The job would wait for two nodes.
        fewer = ("NumNodes=1", "NumTasks=1")
        slurm.run("scontrol", "update", f"JobId={number}", *fewer, "StartTime=now")
        said = job.finish()
    finally:
        slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert job.saved == [400, number_after(400)]
    assert "Round 1: n1, n2, mesh data=2" in said and "n1, mesh data=1" in said
    assert "killed" not in said


@pytest.mark.slow
def test_a_lost_node_is_done_without(slurm, tmp_path):
    """Last of all, since the node does not come back."""
    job = Job(slurm, tmp_path, "--min_hosts=1", steps=300)
    job.wait_for_step(10)
    # Not the first node, whose batch script is the job: Slurm queues the job again without it.
    slurm.lose("n2")
    said = job.finish()
    assert job.saved == [300, number_after(300)]
    assert "Round 1: n1, n2, mesh data=2" in said and "mesh data=1" in said
