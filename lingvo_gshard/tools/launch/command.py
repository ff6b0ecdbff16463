"""The command of a worker: what the user gives, and what an agent makes of it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from lingvo_gshard.core import UserError, stores
from lingvo_gshard.tools.console.launcher import tool_names
from lingvo_gshard.tools.flags.options import read_options, spell_options
from lingvo_gshard.tools.launch.words import check_utf8
from lingvo_gshard.training import AGENTS
from lingvo_gshard.wings.agents.agent import Assignment
from lingvo_gshard.wings.agents.meshes import mesh_choices
from lingvo_gshard.wings.agents.options import AgentOptions
from lingvo_gshard.wings.cluster.member import ClusterOptions

_OURS = "gshard-"
_FROM_AGENTS = ("coordinator", "num_processes", "process_id")


class WorkerCommand:
    """The command that each worker runs."""

    def __init__(self, words: Sequence[str]):
        """Reads the command. Raises UserError if it is missing or has options that agents give."""
        if not words:
            raise UserError(
                "the command to run is missing: gshard-launch local -- gshard-train --logdir=..."
            )
        self.words = list(words)
        for name in _FROM_AGENTS:
            if (value := self.option(name)) is not None:
                raise UserError(f"--{name}={value} in the command: agents choose it; leave it out")

    def option(self, name: str) -> str | None:
        """Returns the last value of a flag in the command; None if it is not there."""
        found = None
        for index, word in enumerate(self.words):
            flag, equals, value = word.partition("=")
            if flag not in (f"--{name}", f"-{name}"):
                continue
            following = self.words[index + 1 : index + 2]
            found = value if equals else (following[0] if following else "")
        return found

    def meeting_place(self, options: AgentOptions) -> str:
        """Returns where agents meet, as an absolute path. Raises UserError if nothing says it."""
        place, logdir = options.meeting_place, self.option("logdir")
        if place is None and not logdir:
            raise UserError(
                "--meeting_place is missing, and the command has no --logdir: a directory or "
                "bucket that all hosts reach"
            )
        return check_utf8(str(stores.absolute(place or f"{logdir}/{AGENTS}")))

    def meshes(self, options: AgentOptions) -> dict[int, str | None]:
        """Returns number of hosts -> mesh. Raises UserError if no mesh is right for so few."""
        mesh = self.option("mesh")
        if mesh is None and options.fewest < options.max_hosts:
            raise UserError(
                f"`min_hosts={options.fewest}` is less than `max_hosts={options.max_hosts}`, which "
                "needs --mesh in the command: it says what fewer hosts can divide"
            )
        found = mesh_choices(mesh, options.max_hosts, options.other_mesh)
        return {hosts: mesh for hosts, mesh in found.items() if hosts >= options.fewest}

    def of_worker(self, assignment: Assignment) -> list[str]:
        """Returns the command of one worker."""
        options = ClusterOptions(
            coordinator=assignment.coordinator,
            num_processes=assignment.count,
            process_id=assignment.index,
        )
        mesh = [] if assignment.mesh is None else [f"--mesh={assignment.mesh}"]
        return [*self.program(), *self.words[1:], *mesh, *spell_options(options)]

    def program(self) -> list[str]:
        """Returns the program: one of this package's commands as this Python runs it."""
        tool = os.path.basename(self.words[0])
        if tool.startswith(_OURS) and tool.removeprefix(_OURS) in tool_names():
            return [sys.executable, "-m", "lingvo_gshard", tool.removeprefix(_OURS)]
        return [self.words[0]]


def read_command(
    values: flags.FlagValues, words: Sequence[str], **fields: Any
) -> tuple[WorkerCommand, AgentOptions]:
    """Returns the command of a worker, and the options of agents with their meeting place."""
    command, options = WorkerCommand(words), read_options(values, AgentOptions, **fields)
    return command, dataclasses.replace(options, meeting_place=command.meeting_place(options))
