# tests: wings/agents/agent.py, wings/agents/leader.py, wings/agents/meeting.py
# tests: wings/agents/keeper.py, wings/agents/worker.py
"""Runs agents as real processes, with workers that start in no time (stand_in.py)."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.agents import stand_in
from tests.agents.stand_in import number_after

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 40
# Seconds that are long on an idle machine; a busy one is slower.
PATIENCE = 60.0
FAST = [
    *("--beat_seconds=0.1", "--lost_seconds=3", "--gather_seconds=30", "--stop_seconds=20"),
    *("--regather_seconds=10", "--max_host_failures=99"),
]


class Job:
    """A job in a directory of its own."""

    def __init__(self, directory: pathlib.Path):
        self.directory, self.meeting_place = directory, f"{directory}/agents"
        self.started: list[subprocess.Popen] = []

    def start(self, *arguments: str, steps: int = STEPS, faults: str = "", mesh: str = "data=2"):
        """Starts gshard-launch with some arguments."""
        worker = [sys.executable, "-S", stand_in.__file__, str(self.directory), str(steps), faults]
        command = [sys.executable, "-m", "lingvo_gshard", "launch", *arguments, *FAST]
        command += [f"--meeting_place={self.meeting_place}", "--", *worker, f"--mesh={mesh}"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        self.started.append(process)
        return process

    def start_local(self, **given):
        return self.start("local", "--hosts=2", **given)

    def start_agent(self, host: str, *arguments: str, **given):
        names = (f"--host={host}", "--address=127.0.0.1", "--max_hosts=2", "--min_hosts=1")
        return self.start("agent", *names, *arguments, **given)

    @property
    def saved(self) -> list:
        return json.loads((self.directory / "saved.json").read_text())

    @property
    def log(self) -> list[list[str]]:
        """Step, number of workers and mesh of each checkpoint."""
        return [line.split() for line in (self.directory / "log").read_text().splitlines()]

    @property
    def restored(self) -> list[str]:
        """Step, number of parts and number of workers of each restored snapshot."""
        return (self.directory / "restored").read_text().splitlines()

    def parts(self, count: int) -> list[int]:
        """Returns the indices of the parts of so many processes on all hosts."""
        names = [path.stem.split("-") for path in self.directory.glob("gshard-*/*.part")]
        return [int(words[4]) for words in names if int(words[3]) == count]

    def wait_for_step(self, step: int) -> None:
        """Waits for a checkpoint of a step or a later one."""
        self.wait_until(lambda: int(self.log[-1][0]) >= step)

    def wait_until(self, is_so) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if is_so():
                    return
            except (OSError, ValueError, IndexError):
                pass
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    for process in job.started:
        process.kill()
        _, said = process.communicate()
        print(said)  # pytest shows it where a test fails


def end(process: subprocess.Popen, code: int = 0) -> str:
    """Waits for a process, checks its exit code, and returns what it said."""
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, said
    return said


def children(pid: int, text: str) -> list[int]:
    """Returns the processes below a process whose command has a text."""
    found = []
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    for child in map(int, path.read_text().split()):
        if text in pathlib.Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "):
            found.append(child)
        found += children(child, text)
    return found


def is_running(pid: int) -> bool:
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def test_a_job_without_failures_takes_every_step_once(job):
    said = end(job.start_local())
    assert job.saved == [STEPS, number_after(STEPS)]
    assert [int(step) for step, _, _ in job.log] == [*range(5, STEPS + 1, 5), STEPS]
    assert {(count, mesh) for _, count, mesh in job.log} == {("2", "data=2")}
    assert "Round 1: local-0, local-1, mesh data=2" in said and "Round 2" not in said


def test_a_killed_worker_changes_no_result(job):
    said = end(job.start_local(faults="1:17:kill,0:28:kill"))
    assert job.saved == [STEPS, number_after(STEPS)]
    assert "Round 2 after local-1 was killed by SIGKILL (after step 16)" in said
    assert "Round 3 after local-0 was killed by SIGKILL (after step 27)" in said


@pytest.mark.slow
def test_a_stopped_worker_is_found_and_replaced(job):
    said = end(job.start_local(faults="1:17:stop"))
    assert job.saved == [STEPS, number_after(STEPS)]
    assert "a signal stopped it for 3 s" in said


def test_an_error_of_one_step_is_tried_once_more_and_then_told(job):
    said = end(job.start_local(faults="1:17:fail!"), code=1)
    assert "Round 2" in said and "Round 3" not in said
    reason = "failed (ValueError: the batch of step 17 is damaged) (after step 16)"
    assert f"twice in a row, the same has happened: local-1 ended: {reason}" in said
    assert job.saved == [15, number_after(15)]


def test_a_command_that_cannot_be_started_is_an_error(tmp_path):
    options = ["--max_hosts=1", f"--meeting_place={tmp_path}/agents", "--beat_seconds=0.1"]
    command = [sys.executable, "-m", "lingvo_gshard", "launch", "agent", *options]
    done = subprocess.run(
        [*command, f"--snapshot_folder={tmp_path}", "--", "no-such-program"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("error: no-such-program: No such file or directory")


@pytest.mark.slow
def test_a_request_to_stop_saves_and_the_same_command_goes_on(job):
    first = job.start_local()
    job.wait_for_step(10)
    first.terminate()
    end(first, code=143)
    step, number = job.saved
    assert 10 <= step < STEPS and number == number_after(step)
    end(job.start_local())
    assert job.saved == [STEPS, number_after(STEPS)]


def test_a_killed_launcher_takes_agents_and_workers_along(job):
    folder = f"--snapshot_folder={job.directory}"
    launcher = job.start("local", "--hosts=2", folder, steps=10_000)
    job.wait_for_step(5)
    started = children(launcher.pid, "")
    assert len(started) >= 4
    launcher.kill()
    job.wait_until(lambda: not any(map(is_running, started)))


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_killed_agent_takes_its_worker_along_and_both_come_back(job, host):
    launcher = job.start_local(steps=100)
    job.wait_for_step(5)
    (agent,) = children(launcher.pid, f"--host=local-{host}")[:1]
    os.kill(agent, signal.SIGKILL)
    said = end(launcher)
    assert job.saved == [100, number_after(100)]
    assert f"after local-{host} lost its agent" in said


@pytest.mark.slow
def test_a_host_that_is_left_alone_goes_on_from_the_snapshot_of_all(job, monkeypatch, tmp_path):
    """Three hosts have no checkpoint. One is lost, and then another one."""
    monkeypatch.setenv("STAND_IN_SAVE_EVERY", "9999")
    options = ("--max_hosts=3", "--regather_seconds=1", "--other_mesh=data=2")
    options += (f"--snapshot_folder={tmp_path}",)
    agents = [job.start_agent(host, *options, steps=320, mesh="data=3") for host in "abc"]
    for count, agent in ((3, agents[0]), (2, agents[1])):
        job.wait_until(lambda count=count: all(job.parts(count).count(k) > 2 for k in range(count)))
        agent.kill()
    end(agents[2])
    assert job.saved == [320, number_after(320)]
    # Of each snapshot, each host that was left has read the parts of all.
    restored = [tuple(map(int, line.split()[1:])) for line in job.restored]
    assert sorted(restored) == [(2, 1), (3, 2), (3, 2)]
    assert not list(tmp_path.glob("gshard-*"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [["r", "r", "s", "s"], 2], ids=["racks", "copies"])
def test_two_hosts_that_are_lost_together_cost_no_snapshot(job, monkeypatch, tmp_path, options):
    """Neither of them has the other's only copy: it is in another rack, or there are two."""
    monkeypatch.setenv("STAND_IN_SAVE_EVERY", "9999")
    given = ["--max_hosts=4", "--min_hosts=2", "--regather_seconds=1", "--other_mesh=data=2"]
    given.append(f"--snapshot_folder={tmp_path}")
    racks = [f"--rack={rack}" for rack in options] if isinstance(options, list) else [""] * 4
    if isinstance(options, int):
        given.append(f"--snapshot_copies={options}")
    agents = [
        job.start_agent(host, *given, *filter(None, [rack]), steps=320, mesh="data=4")
        for host, rack in zip("abcd", racks, strict=True)
    ]
    copies = 2 if isinstance(options, list) else 3
    job.wait_until(lambda: all(job.parts(4).count(k) > copies for k in range(4)))
    for agent in agents[2:]:
        agent.kill()
    for agent in agents[:2]:
        end(agent)
    assert job.saved == [320, number_after(320)]
    assert {line.split()[1] for line in job.restored} == {"4"}


@pytest.mark.slow
def test_a_lost_host_is_done_without_until_it_returns(job):
    """Host a leads and is lost; b goes on alone on a smaller mesh; a returns, and both go on."""
    options = ("--grow_seconds=1", "--regather_seconds=1")
    lost = job.start_agent("a", *options, steps=200)
    other = job.start_agent("b", *options, steps=200)
    job.wait_for_step(5)
    lost.kill()
    job.wait_until(lambda: job.log[-1][1:] == ["1", "data=1"])
    returned = job.start_agent("a", *options, steps=200)
    job.wait_until(lambda: job.log[-1][1:] == ["2", "data=2"])
    end(returned), end(other)
    assert job.saved == [200, number_after(200)]
