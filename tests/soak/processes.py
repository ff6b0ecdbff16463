"""Starts gshard-train, in one process or several, by a fork of a process with the libraries loaded.

The standard library's fork server imports the command once. A fork of it is a process of its own
that nothing shares with the others, so `kill -9` does to it what it does to any. It saves the six
seconds of CPU time that importing takes.
"""

import atexit
import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.soak.setups import Setup

_FORKED = "tests.soak.forked"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([_FORKED])


class TrainingStart:
    """One start of gshard-train: its processes and what they print.

    Attributes:
      pids: ids of the processes, the main one first.
      outputs: the files with what each process prints.
      port: where several processes meet.
    """

    def __init__(self, flags: Sequence[str], setup: Setup, output: pathlib.Path, is_forked: bool):
        """Starts the processes.

        Args:
          flags: the command's flags but those of the setup.
          setup: mesh, strategy and number of processes.
          output: prefix of the files that get what each process prints.
          is_forked: whether to fork a process with the libraries loaded, or start Python anew.
        """
        flags = [*flags, *setup.flags()]
        self.outputs = [output.with_name(f"{output.name}.{i}") for i in range(setup.processes)]
        meeting, self.port = [], _free_port()
        if setup.processes > 1:
            meeting = [
                f"--coordinator=localhost:{self.port}",
                f"--num_processes={setup.processes}",
            ]
        start = _fork if is_forked else _execute
        self._processes = []
        for index, path in enumerate(self.outputs):
            own = [*meeting, f"--process_id={index}"] if meeting else []
            path.touch()
            self._processes.append(start([*flags, *own], path))
        self.pids = [process.pid for process in self._processes]

    @property
    def is_running(self) -> bool:
        """Whether a process has not ended."""
        return any(_exit_code(process) is None for process in self._processes)

    @property
    def text(self) -> str:
        """What the processes have printed so far."""
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in self.outputs)

    def signal(self, number: int, process: int | None = None) -> None:
        """Sends a signal to one process; None sends it to all."""
        pids = self.pids if process is None else [self.pids[process]]
        for pid, running in zip(self.pids, self._processes, strict=True):
            if pid in pids and _exit_code(running) is None:
                os.kill(pid, number)

    def wait(self, seconds: float) -> list[int] | None:
        """Returns the exit codes, of a killed process minus the signal's number; None in time."""
        deadline = time.monotonic() + seconds
        while self.is_running:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return [_exit_code(process) for process in self._processes]


def _fork(flags: list[str], output: pathlib.Path) -> multiprocessing.Process:
    process = _CONTEXT.Process(target=_train, args=(flags, str(output)))
    process.start()
    return process


def _train(flags: list[str], output: str) -> None:
    """Runs the command in a fork, as its console script does."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["gshard-train", *flags]
    from lingvo_gshard.tools.console import entry

    try:
        entry.run_script()
    finally:
        # A fork ends without what a process of its own does at its end.
        atexit._run_exitfuncs()


def _execute(flags: list[str], output: pathlib.Path) -> subprocess.Popen:
    with open(output, "ab") as file:
        command = [sys.executable, "-m", "lingvo_gshard", "train", *flags]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def _exit_code(process: subprocess.Popen | multiprocessing.Process) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]
