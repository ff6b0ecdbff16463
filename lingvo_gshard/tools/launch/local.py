"""Runs the hosts of a job as processes of this machine."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from absl import flags

from lingvo_gshard.core import EXIT_CODES, called_before_abrupt_end, declared, signals
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import integer, maker
from lingvo_gshard.tools.flags.options import DRY_RUN, option_flags, spell_options
from lingvo_gshard.tools.launch.command import read_command
from lingvo_gshard.wings.agents.options import AgentOptions, HostOptions
from lingvo_gshard.wings.agents.worker import start_process

_POLL_SECONDS = 0.2


_AGENT = [name for name in declared(AgentOptions) if name != "max_hosts"]
define_flags = maker(
    hosts=integer("Number of hosts.", 1, 1),
    **option_flags(AgentOptions(), _AGENT),
    dry_run=DRY_RUN,
    json=output.json_flag("what would be started"),
)


def run(values: flags.FlagValues, console: output.Console, words: Sequence[str]) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    command, options = read_command(values, words, max_hosts=values.hosts)
    mesh = command.meshes(options)[values.hosts]
    commands = [_agent(options, f"local-{k}", words) for k in range(values.hosts)]
    if values.dry_run:
        for one in commands:
            console.say(shlex.join(["gshard-launch", *one[4:]]))
        output.write_json(values.json, {"commands": commands})
        return 0
    environment = _devices(mesh, values.hosts)
    with (
        signals.StopRequest() as stop,
        LocalAgents(commands, environment, options.max_restarts) as agents,
    ):
        stop.finishing = True
        with called_before_abrupt_end(agents.kill):
            return agents.wait(stop)


def _agent(options: AgentOptions, host: str, words: Sequence[str]) -> list[str]:
    flags_ = spell_options(options) + spell_options(HostOptions(host=host, address="127.0.0.1"))
    return [sys.executable, "-m", "lingvo_gshard", "launch", "agent", *flags_, "--", *words]


def _devices(mesh: str | None, hosts: int) -> dict[str, str]:
    """Returns the environment variables that give each host its share of virtual CPU devices."""
    if mesh is None:
        return {}
    return {"JAX_NUM_CPU_DEVICES": str(Mesh.parse(mesh).size // hosts)}


class LocalAgents:
    """The agents of all hosts, as children of this process."""

    def __init__(
        self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], max_restarts: int
    ):
        """Starts an agent for each command; its death by a signal starts it again."""
        self._restarts_left = max_restarts
        self._commands, self._environment = commands, environment
        self._processes = [self._start(index) for index in range(len(commands))]

    def __enter__(self) -> LocalAgents:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self, stop: signals.StopRequest) -> int:
        """Waits for all agents, and passes a request to stop on to them.

        Returns 0 if the job has ended well, or the code of the request or of the first failure.
        """
        is_stopping = False
        while any(process.poll() is None for process in self._processes):
            if stop.requested and not is_stopping:
                is_stopping = True
                self._signal(signal.SIGTERM)
            for index, process in enumerate(self._processes):
                was_killed = (process.poll() or 0) < 0
                if was_killed and not is_stopping and self._restarts_left > 0:
                    self._restarts_left -= 1
                    self._processes[index] = self._start(index)
            time.sleep(_POLL_SECONDS)
        codes = [process.returncode for process in self._processes]
        if is_stopping and any(codes):
            return EXIT_CODES[stop.requested or "SIGTERM"]
        return next((1 if code < 0 else code for code in codes if code), 0)

    def kill(self) -> None:
        """Ends all agents at once, and so their workers."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        # Ctrl-C in a terminal reaches this process alone, which passes it on once.
        return start_process(self._commands[index], self._environment)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)
