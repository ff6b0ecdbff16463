"""Runs the agent of one host, which starts the worker and watches it."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from lingvo_gshard.core import UserError
from lingvo_gshard.tools.console import output, warn
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.tools.launch.command import WorkerCommand, read_command
from lingvo_gshard.wings.agents import leftovers
from lingvo_gshard.wings.agents.agent import Agent, Host
from lingvo_gshard.wings.agents.keeper import Keeper
from lingvo_gshard.wings.agents.meeting import Meeting, shared_secret
from lingvo_gshard.wings.agents.options import AgentOptions, HostOptions
from lingvo_gshard.wings.agents.sightings import AnyMeeting
from lingvo_gshard.wings.cluster.rendezvous import SECRET
from lingvo_gshard.wings.services.run_lock import JOB

# Slurm's name of a node, which others reach it by.
_SLURM_NODE = "SLURMD_NODENAME"
# The switches above the node and the node, with dots between, where Slurm knows the network.
_SLURM_SWITCHES = "SLURM_TOPOLOGY_ADDR"

define_flags = maker(
    **option_flags(AgentOptions()),
    **option_flags(HostOptions()),
    json=output.json_flag("the exit code"),
)


def run(values: flags.FlagValues, console: output.Console, words: Sequence[str]) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    del console
    command, options = read_command(values, words)
    host = _host(read_options(values, HostOptions))
    place = str(options.meeting_place)
    meshes = command.meshes(options)
    secret, job = shared_secret(place), job_of(place)
    meeting = Meeting(place, secret, functools.partial(say, host.name))
    variables = {SECRET: secret, JOB: job}
    code = run_agent(command, options, host, meeting, meshes, job, variables)
    output.write_json(values.json, {"host": host.name, "code": code})
    return code


def job_of(place: str) -> str:
    """Returns a text that differs from job to job, of letters and digits."""
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def run_agent(
    command: WorkerCommand,
    options: AgentOptions,
    host: Host,
    meeting: AnyMeeting,
    meshes: Mapping[int, str | None],
    job: str,
    variables: Mapping[str, str],
) -> int:
    """Runs the agent of a host until its part of a job ends. Returns the exit code.

    Args:
      meshes: number of hosts -> mesh, for each number that can train.
      variables: of workers, with the job's secret.
    """
    told = functools.partial(say, host.name)
    folder = leftovers.folder_of(options.snapshot_folder, job, host.name)
    try:
        keeper = Keeper(folder, host.address, variables[SECRET], told)
    except BlockingIOError:
        raise UserError(
            f"`host={host.name}`: another agent of this job and host runs on this machine"
        ) from None
    except OSError as error:
        reason = f"{folder} cannot be used ({error.strerror})"
        raise UserError(f"`snapshot_folder={options.snapshot_folder}`: {reason}") from None
    of_worker = command.of_worker
    return Agent(options, host, meeting, meshes, of_worker, variables, keeper, _check, told).run()


def _host(options: HostOptions) -> Host:
    """Returns this host. Raises UserError if its name cannot be a file's."""
    machine = os.environ.get(_SLURM_NODE) or socket.gethostname()
    name = options.host or machine
    if "/" in name or name.startswith("."):
        raise UserError(f"`host={name}` cannot be the name of a file, as a host's must be")
    switches = os.environ.get(_SLURM_SWITCHES, "").rpartition(".")[0]
    rack = options.rack if options.rack is not None else switches
    return Host(name, options.address or machine, options.alive_file, rack)


def _check(path: str) -> list[str]:
    """Returns the command that checks this host and writes what it finds to a file."""
    return [sys.executable, "-m", "lingvo_gshard", "doctor", f"--json={path}"]


def say(host: str, text: str) -> None:
    """Shows a line about a host."""
    warn(f"[{host}] {text}")
