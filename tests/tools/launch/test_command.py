# tests: tools/launch/command.py, wings/agents/options.py, tools/launch/words.py
# tests: tools/launch/__init__.py, tools/launch/local.py, tools/launch/agent.py
"""Checks what gshard-launch makes of a command, and what it refuses."""

import sys

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import launch
from lingvo_gshard.tools.launch.command import WorkerCommand
from lingvo_gshard.wings.agents.agent import Assignment
from lingvo_gshard.wings.agents.options import AgentOptions


def test_options_are_read_as_absl_reads_them():
    command = WorkerCommand(["x", "--mesh=data=2", "--logdir", "runs/a", "--mesh=data=4"])
    assert command.option("mesh") == "data=4" and command.option("logdir") == "runs/a"
    assert command.option("steps") is None


def test_a_worker_gets_its_place_in_the_round():
    command = WorkerCommand(["gshard-train", "--mesh=data=4"])
    words = command.of_worker(Assignment(1, 2, "a:7000", "data=2"))
    python = [sys.executable, "-m", "lingvo_gshard", "train"]
    place = ["--coordinator=a:7000", "--num_processes=2", "--process_id=1"]
    assert words == [*python, "--mesh=data=4", "--mesh=data=2", *place]
    words = WorkerCommand(["./mine", "-x"]).of_worker(Assignment(0, 1, "a:7000", None))
    assert words == ["./mine", "-x", "--coordinator=a:7000", "--num_processes=1", "--process_id=0"]


def test_agents_meet_in_the_log_directory_unless_told_otherwise(tmp_path):
    command = WorkerCommand(["gshard-train", f"--logdir={tmp_path}"])
    assert command.meeting_place(AgentOptions()) == f"{tmp_path}/agents"
    assert command.meeting_place(AgentOptions(meeting_place="gs://b/c")) == "gs://b/c"
    with pytest.raises(UserError, match="--meeting_place is missing"):
        WorkerCommand(["gshard-train"]).meeting_place(AgentOptions())


def test_fewer_hosts_need_a_mesh():
    command = WorkerCommand(["gshard-train"])
    assert command.meshes(AgentOptions(max_hosts=4)) == {4: None}
    with pytest.raises(UserError, match="needs --mesh"):
        command.meshes(AgentOptions(max_hosts=4, min_hosts=2))
    command = WorkerCommand(["gshard-train", "--mesh=data=8"])
    assert command.meshes(AgentOptions(max_hosts=4, min_hosts=2)) == {4: "data=8", 2: "data=4"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["local", "--hosts=2"], "the command to run is missing"),
        (["local", "--", "gshard-train", "--process_id=0"], "--process_id=0 in the command"),
        (["cloud", "--", "gshard-train"], "'cloud' is unknown"),
        (["local", "--min_hosts=2", "--", "gshard-train", "--logdir=x"], "`min_hosts=2` is more"),
        (["agent", "--lost_seconds=1", "--", "x"], "`lost_seconds=1` is too short"),
    ],
)
def test_mistakes_are_named(words, named):
    with pytest.raises(UserError, match=named):
        launch.main(["gshard-launch", *words])


def test_a_dry_run_shows_each_agent_and_starts_nothing(tmp_path, capsys):
    arguments = ["local", "--hosts=2", "--max_restarts=3", "--dry_run"]
    command = ["gshard-train", f"--logdir={tmp_path}/run", "--mesh=data=2"]
    assert launch.main(["gshard-launch", *arguments, "--", *command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and not list(tmp_path.iterdir())
    assert lines[1] == (
        f"gshard-launch agent --max_hosts=2 --meeting_place={tmp_path}/run/agents --max_restarts=3 "
        f"--host=local-1 --address=127.0.0.1 -- gshard-train --logdir={tmp_path}/run --mesh=data=2"
    )
