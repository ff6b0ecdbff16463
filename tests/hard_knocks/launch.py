"""How a command is started: its directory, environment, streams and limits.

    python -m tests.hard_knocks.launch FIELDS_OF_A_LAUNCH_AS_JSON

starts one in a new interpreter. This file imports nothing that a command might import.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import resource
import sys

_CONSOLE_SCRIPT = """
import sys
from lingvo_gshard.tools.console.entry import run_script
sys.exit(run_script())
"""


@dataclasses.dataclass
class Launch:
    """A command and its surroundings.

    Attributes:
      arguments: sys.argv: the path of a console script or of __main__.py, and the arguments.
      directory: the current directory.
      environment: all environment variables.
      streams: the files of standard input, output and error; None is closed.
      limits: resource limits by name, such as "RLIMIT_FSIZE".
    """

    arguments: list[str]
    directory: str
    environment: dict[str, str]
    streams: list[str | None]
    limits: dict[str, int]

    def enter(self) -> None:
        """Gives this process the directory, environment, streams and limits."""
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        for number, path in enumerate(self.streams):
            _redirect(number, path)
        for name, limit in self.limits.items():
            resource.setrlimit(getattr(resource, name), (limit, limit))


def _redirect(number: int, path: str | None) -> None:
    if path is None:
        os.close(number)
        return
    flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
    opened = os.open(path, flags)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)


def _command(arguments: list[str]) -> list[str]:
    """Returns the interpreter's command line, with a console script as pip writes it."""
    program = pathlib.Path(arguments[0])
    if program.suffix == ".py":
        return [sys.executable, "-m", program.parent.name, *arguments[1:]]
    program.write_text(_CONSOLE_SCRIPT)
    return [sys.executable, *arguments]


if __name__ == "__main__":
    launch = Launch(**json.loads(sys.argv[1]))
    command = _command(launch.arguments)
    launch.enter()
    os.execv(command[0], command)
