"""Spare: a process that has loaded the libraries of a worker, and waits to become the next one.

TensorFlow and jax take seconds to load, more where several workers of one machine start together.
The agent starts a spare while its worker trains. When workers start again, the spare gets the
command and the variables of the next worker through a pipe, and goes on as Python would have with
`python -m MODULE`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.runtime import standard_error

# Imported by every worker.
LIBRARIES = ("tensorflow", "jax", "orbax.checkpoint")


class Spare:
    """Starts a spare process, and later makes it a worker; used by the agent."""

    def __init__(
        self,
        module: str,
        start: Callable[..., subprocess.Popen],
        libraries: Sequence[str] = LIBRARIES,
    ):
        """Starts the process.

        Args:
          module: what it will run.
          start: starts a process, given its command, variables to add to the variables of this
            process, and what `subprocess.Popen` takes besides.
          libraries: what to load. A library that is not there is left to the worker.

        Raises:
          OSError: it cannot be started.
        """
        self._module = module
        reading, writing = os.pipe()
        self._order = os.fdopen(writing, "w")
        try:
            command = [sys.executable, "-m", __name__, str(reading), module, *libraries]
            self._process = start(command, {}, pass_fds=[reading])
        except OSError:
            self._order.close()
            raise
        finally:
            os.close(reading)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen | None:
        """Makes the spare process a worker and returns it.

        A process that has died or runs another module is ended, and None is returned.

        Args:
          environment: variables to add to the variables of this process.
        """
        if module_of(command) == self._module and self._process.poll() is None:
            order = {"arguments": list(command[3:]), "environment": dict(environment)}
            with contextlib.suppress(BrokenPipeError):
                self._order.write(json.dumps(order))
                self._order.close()
                return self._process
        self.close()
        return None

    def close(self) -> None:
        """Ends the waiting process."""
        with contextlib.suppress(BrokenPipeError):
            self._order.close()
        self._process.kill()
        self._process.wait()


def module_of(command: Sequence[str]) -> str | None:
    """Returns MODULE of a command `PYTHON -m MODULE ...` with this Python; None for others."""
    is_ours = [*command[:2]] == [sys.executable, "-m"] and len(command) > 2
    return command[2] if is_ours else None


def _load(libraries: Sequence[str]) -> None:
    """Imports libraries, and hides what they print."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with standard_error.hide():
        for name in libraries:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def main() -> None:
    """Loads the libraries, waits for the agent's order, and runs the worker's module.

    Ends if the agent closes the pipe without an order.
    """
    descriptor, module, *libraries = sys.argv[1:]
    _load(libraries)
    with open(int(descriptor)) as pipe:
        text = pipe.read()
    if text:
        order = json.loads(text)
        os.environ.update(order["environment"])
        # runpy sets the first one to the module's file.
        sys.argv = [module, *order["arguments"]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
