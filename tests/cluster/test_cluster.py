"""Checks that clusters of real processes save, stop, fail and resume together."""

import dataclasses
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from lingvo_gshard.core import processes
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.wings.cluster.cluster import Cluster
from lingvo_gshard.wings.cluster.member import ClusterOptions
from lingvo_gshard.wings.cluster.peer_monitor import Departure
from lingvo_gshard.wings.cluster.worker_report import REPORT_FILE
from tests.cluster import cluster_run

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class ExitedProcess:
    """Exit code and output of a process."""

    code: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last line of standard error that gRPC, whose peer has gone, did not write."""
        lines = self.err.strip().splitlines()
        return next(line for line in reversed(lines) if "grpc" not in line.lower())

    @property
    def report(self) -> dict:
        return json.loads(self.out.strip().splitlines()[-1])


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def start(logdir, steps, plan="", devices=2, **given) -> subprocess.Popen:
    """Starts one process with flags; names in capitals are environment variables."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment |= {name: str(value) for name, value in given.items() if name.isupper()}
    arguments = [f"--{name}={value}" for name, value in given.items() if name.islower()]
    command = [
        sys.executable,
        "-m",
        "tests.cluster.cluster_run",
        str(logdir),
        str(steps),
        plan,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command + arguments, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def finish(*started: subprocess.Popen) -> list[ExitedProcess]:
    try:
        outputs = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        ExitedProcess(p.returncode, *output) for p, output in zip(started, outputs, strict=True)
    ]


def run(count, logdir, steps, plan="", devices=2, **given) -> list[ExitedProcess]:
    """Runs a cluster of `count` processes to its end."""
    coordinator = f"localhost:{free_port()}"
    return finish(
        *[
            start(
                logdir,
                steps,
                plan,
                devices,
                coordinator=coordinator,
                num_processes=count,
                process_id=k,
                **given,
            )
            for k in range(count)
        ]
    )


def expected(steps: int) -> dict[str, np.ndarray]:
    """Returns what cluster_run computes, by NumPy; all numbers are exact in float32."""
    rows, columns = cluster_run.ROWS, cluster_run.COLUMNS
    w = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    row = np.arange(rows, dtype=np.float32)
    for _ in range(steps):
        mean = row.mean()
        w, row = w + mean, row + 1
    return {"w": w, "scale": np.arange(3).astype(ml_dtypes.bfloat16), "w.row": row}


def assert_saved(logdir, steps: int) -> None:
    store = CheckpointStore(logdir / "checkpoints", writable=False)
    checkpoint = store.restore()
    assert checkpoint.step == steps
    found, wanted = {**checkpoint.theta, **checkpoint.moments}, expected(steps)
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert found[path].tobytes() == array.tobytes(), path


def assert_good(*ended: ExitedProcess) -> None:
    for process in ended:
        assert process.code == 0, process.err


@pytest.mark.slow
def test_checkpoints_move_between_numbers_of_processes(tmp_path):
    """2 x 2 devices, then 1 x 4, then 2 x 1 compute the same bits."""
    one, other = run(2, tmp_path, steps=7)
    assert_good(one, other)
    assert one.report == {"process": 0, "from": 0, "to": 7}
    assert other.report == {"process": 1, "from": 0, "to": 7}
    assert one.out.count("mean") == 7 and other.out.count("mean") == 0
    assert_saved(tmp_path, 7)
    (alone,) = finish(start(tmp_path, 9, devices=4))
    assert_good(alone)
    assert alone.report == {"process": 0, "from": 7, "to": 9}
    both = run(2, tmp_path, steps=10, devices=1)
    assert_good(*both)
    assert both[1].report == {"process": 1, "from": 9, "to": 10}
    assert_saved(tmp_path, 10)


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process_fails_the_save_of_all_at_once(tmp_path):
    """Without being told, the other process would wait for half an hour."""
    both = run(2, tmp_path, 12, plan="1:4:full,1:8:room")
    assert_good(*both)
    assert both[0].out.count("could not be saved") == 1 and both[1].out.count("saved") == 0
    who = f"process 1 on {platform.node()}"
    assert f"Warning: the checkpoint of step 5 could not be saved ({who}: OSError" in both[0].out
    assert "there is none" in both[0].out
    assert_saved(tmp_path, 12)
    assert CheckpointStore(tmp_path / "checkpoints", writable=False).steps == [10, 12]


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_disk_that_fills_while_one_process_saves_fails_the_save_of_all_at_once(tmp_path, process):
    """The other process stops waiting. What was written of the checkpoint is not taken for one."""
    both = run(2, tmp_path, 12, plan=f"{process}:4:fill,{process}:8:room")
    assert_good(*both)
    assert both[0].out.count("could not be saved") == 1 and both[1].out.count("saved") == 0
    who = "process 1 on " if process else ""
    assert f"Warning: the checkpoint of step 5 could not be saved ({who}" in both[0].out
    assert "there is none" in both[0].out
    assert_saved(tmp_path, 12)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "12"]
    assert "Traceback" not in both[0].err + both[1].err


def test_death_of_a_process_ends_the_other_with_a_message(tmp_path):
    survivor, dead = run(2, tmp_path, 200, plan="1:9:kill")
    assert dead.code == -9
    assert survivor.code == 1
    assert survivor.last_words in (
        "process 1 of 2 is gone; continue with the same command (last checkpoint: step 5)",
        # The save of step 5 may have been in progress.
        "process 1 of 2 is gone; continue with the same command (no checkpoint yet)",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "name"), [(1, "SIGTERM"), pytest.param(0, "SIGINT", marks=pytest.mark.slow)]
)
def test_signal_to_one_process_stops_all_at_the_same_step(tmp_path, process, name):
    ended = run(2, tmp_path, 200, plan=f"{process}:7:{name}")
    assert_good(*ended)
    assert ended[0].report["to"] == ended[1].report["to"] == 7
    assert "finishing the step and saving" in ended[process].err
    assert_saved(tmp_path, 7)


@pytest.mark.slow
def test_death_of_process_0_ends_the_others_with_a_message(tmp_path):
    dead, *survivors = run(3, tmp_path, 200, plan="0:3:kill", devices=1)
    assert dead.code == -9
    for survivor in survivors:
        assert survivor.code == 1
        words = "process 0 of 3 is gone; continue with the same command (no checkpoint yet)"
        assert words in survivor.err


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_error_in_one_process_ends_the_others_with_its_message(tmp_path, process):
    ended = run(2, tmp_path, 200, plan=f"{process}:3:fail")
    assert [e.code for e in ended] == [1, 1]
    assert ended[process].last_words == "error: the data of this process cannot be read"
    assert ended[1 - process].last_words == (
        f"process {process} of 2 failed (ValueError: the data of this process cannot be read); "
        "continue with the same command (no checkpoint yet)"
    )


@pytest.mark.slow
def test_program_that_fails_before_joining_the_cluster_ends(tmp_path):
    """jax alone would wait for minutes."""
    ended = run(2, tmp_path, 3, plan="early")
    assert [process.code for process in ended] == [1, 1]
    words = "ValueError: after joining, before the program is with the others"
    # jax may end one process when the other has ended.
    assert any(process.last_words == words for process in ended)


@pytest.mark.slow
def test_a_stop_before_the_first_step_ends_all_processes(tmp_path):
    ended = run(2, tmp_path, 200, plan="1:0:SIGTERM")
    assert [process.code for process in ended] == [143, 143]
    words = (
        "process 1 of 2 was stopped (SIGTERM) before the first step; continue with the same command"
    )
    assert words in ended[0].err


@pytest.mark.slow
def test_any_number_of_processes_resumes_after_a_death(tmp_path):
    run(2, tmp_path, 200, plan="1:13:kill")
    step = max(
        int(child.name) for child in (tmp_path / "checkpoints").iterdir() if child.name.isdigit()
    )
    assert step in (5, 10)
    ended = run(4, tmp_path, 14, devices=1)
    assert_good(*ended)
    assert {e.report["from"] for e in ended} == {step}
    assert_saved(tmp_path, 14)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_reported_once(tmp_path):
    assert_good(*run(2, tmp_path, 7))
    (tmp_path / "checkpoints" / "7" / "run" / "run.json").write_text("{")
    ended = run(2, tmp_path, 8)
    assert_good(*ended)
    assert {e.report["from"] for e in ended} == {5}
    said = [e.out.count("Warning: the checkpoint of step 7 is damaged") for e in ended]
    assert said == [1, 0]
    assert_saved(tmp_path, 8)


@pytest.mark.slow
def test_slurm_sets_the_processes(tmp_path):
    """The environment is that of srun on one machine."""
    slurm = {"SLURM_JOB_ID": 12, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": 2}
    slurm["JAX_COORDINATOR_PORT"] = free_port()
    ended = finish(
        *[start(tmp_path, 3, SLURM_PROCID=k, SLURM_LOCALID=k, **slurm) for k in range(2)]
    )
    assert_good(*ended)
    assert [e.report["process"] for e in ended] == [0, 1]
    assert_saved(tmp_path, 3)


@pytest.mark.slow
def test_directories_that_are_not_shared_are_an_error(tmp_path):
    coordinator = f"localhost:{free_port()}"
    both = {"coordinator": coordinator, "num_processes": 2}
    ended = finish(*[start(tmp_path / str(k), 3, process_id=k, **both) for k in range(2)])
    for process in ended:
        assert process.code == 1
    assert f"error: `logdir={tmp_path / '0'}` of process 1 is another directory" in ended[0].err


def test_single_process_joins_no_cluster():
    for given in ({}, {"num_processes": 1}, {"num_processes": 1, "process_id": 0}):
        with Cluster.join(ClusterOptions(**given)) as cluster:
            assert (cluster.size, cluster.index, cluster.is_main) == (1, 0, True)
    assert (processes.count(), processes.index(), processes.is_main()) == (1, 0, True)
    assert processes.gather({"a": [1, 2]}) == [{"a": [1, 2]}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"coordinator": "host:1234", "num_processes": 2},
            "`process_id` is missing; `coordinator=host:1234` `num_processes=2` needs all three",
        ),
        ({"process_id": 0}, "`coordinator` and `num_processes` are missing; `process_id=0` needs"),
        (
            {"num_processes": 2},
            "`coordinator` and `process_id` are missing; `num_processes=2` needs",
        ),
        (
            {"coordinator": "host:1234", "num_processes": 2, "process_id": 2},
            "`process_id=2` is out of range: with `num_processes=2`, 0 to 1 is expected",
        ),
        (
            {"coordinator": "host:1234", "num_processes": 2, "process_id": -1},
            "`process_id=-1` is out of range",
        ),
        (
            {"coordinator": "host:1234", "num_processes": 0, "process_id": 0},
            "`num_processes=0` is out of range: at least 1 is expected",
        ),
        (
            {"coordinator": "host", "num_processes": 2, "process_id": 0},
            "`coordinator=host` is not host:port, such as",
        ),
        (
            {"coordinator": "host:0", "num_processes": 2, "process_id": 0},
            "`coordinator=host:0` is not host:port, such as",
        ),
    ],
)
def test_contradicting_options_are_rejected(given, message):
    with pytest.raises(ValueError) as caught:
        Cluster.join(ClusterOptions(**given))
    assert message in str(caught.value)


def test_an_incomplete_cluster_environment_is_an_error(monkeypatch):
    """Slurm variables without the values that jax needs."""
    for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "not a number")
    with pytest.raises(ValueError, match="`coordinator`, `num_processes` and `process_id` are not"):
        Cluster.join()


@pytest.mark.parametrize(
    ("has_agent", "expected"),
    [
        (False, "process 1 of 2 is gone; continue with the same command"),
        (True, "process 1 of 2 is gone; the agents go on from the newest state that they have"),
    ],
)
def test_a_worker_of_an_agent_asks_nobody_to_start_it_again(has_agent, expected, monkeypatch):
    monkeypatch.delenv(REPORT_FILE, raising=False)
    if has_agent:
        monkeypatch.setenv(REPORT_FILE, "report.json")
    monkeypatch.setattr(Cluster, "size", 2)
    cluster = Cluster()
    assert cluster._describe(Departure(1, "is gone", 1)) == expected
