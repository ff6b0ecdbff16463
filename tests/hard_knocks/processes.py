"""Starts commands as users do: by the zygote, or in a new process where imports matter."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import shlex
import signal
import socket
import subprocess
import sys

import lingvo_gshard
from tests.hard_knocks.launch import Launch

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What the tests of compiled programs set and users do not, and what would start a thread.
_TESTS_OWN = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "TF_CPP_MIN_LOG_LEVEL", "COLUMNS")
_ENVIRONMENT = {name: v for name, v in os.environ.items() if name not in _TESTS_OWN} | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "OPENBLAS_NUM_THREADS": "1",
}


def environment(**values: str) -> dict[str, str]:
    """Returns a user's environment with some variables set."""
    return {**_ENVIRONMENT, **values}


def arguments_of(command: str, scripts: pathlib.Path) -> list[str]:
    """Returns sys.argv of a command line such as "gshard-train --list".

    Args:
      command: what the user types.
      scripts: the directory of the console scripts.
    """
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "lingvo_gshard"]:
        return [str(pathlib.Path(lingvo_gshard.__file__).parent / "__main__.py"), *words[3:]]
    return [str(scripts / words[0]), *words[1:]]


class Zygote:
    """Starts commands as children of a process that has imported everything."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hard_knocks.zygote", str(theirs.fileno())],
            cwd=ROOT,
            env=environment(TF_CPP_MIN_LOG_LEVEL="2"),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._answers = self._socket.makefile("rb")
        assert self._answers.readline() == b"ready\n", "the zygote did not start"

    def start(self, launch: Launch) -> int:
        """Starts a command and returns its process id."""
        return self._ask(start=dataclasses.asdict(launch))

    def wait(self, process: int, seconds: float) -> int:
        """Waits for a command. Returns its exit code, negative for a signal.

        Kills the command, and all that it started, after `seconds`.
        """
        _await_end(process, seconds)
        return self._ask(wait=process)

    def close(self) -> None:
        """Ends the zygote."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _ask(self, **request: object) -> int:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return int(self._answers.readline())


class NewInterpreters:
    """Starts each command in a new interpreter, as a shell does. Takes seconds for imports."""

    def __init__(self):
        self._started: dict[int, subprocess.Popen] = {}

    def start(self, launch: Launch) -> int:
        """Starts a command and returns its process id."""
        argument = json.dumps(dataclasses.asdict(launch))
        command = [sys.executable, "-m", "tests.hard_knocks.launch", argument]
        process = subprocess.Popen(command, cwd=ROOT)
        self._started[process.pid] = process
        return process.pid

    def wait(self, process: int, seconds: float) -> int:
        """Waits for a command, as `Zygote.wait`."""
        _await_end(process, seconds)
        return self._started.pop(process).wait()


def _await_end(process: int, seconds: float) -> None:
    """Waits until a process has ended, and kills its group."""
    handle = os.pidfd_open(process)
    select.select([handle], [], [], seconds)
    os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
