"""Runs other libraries in a Python process of their own."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from lingvo_gshard.core.errors import UserError

# The folder of the source tree.
_ROOT = str(pathlib.Path(__file__).parents[1])


def define_peer_flags(values: flags.FlagValues, libraries: str) -> None:
    """Defines --peers_python and --threads of a comparison with some libraries."""
    flags.DEFINE_string(
        "peers_python",
        None,
        f"A Python that has {libraries}; by default the one that runs.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "threads",
        0,
        "Threads of each engine; 0: one for each core.",
        0,
        flag_values=values,
    )


def find_python(given: str | None, libraries: Sequence[str]) -> str | None:
    """Returns the path of a Python that has some libraries, or None if there is none.

    Args:
      given: the value of --peers_python. Without it, the running Python is tried.
      libraries: the names of the modules.

    Raises:
      UserError: the given Python lacks a library.
    """
    if given:
        if not has_libraries(given, libraries):
            *most, last = libraries
            raise UserError(
                f"--peers_python={given}: this Python has not all of {', '.join(most)} and {last}"
            )
        return given
    return sys.executable if all(map(importlib.util.find_spec, libraries)) else None


def has_libraries(python: str, libraries: Sequence[str]) -> bool:
    """Returns whether a Python can find all of these modules."""
    modules = ", ".join(map(repr, libraries))
    program = f"import importlib.util as u; assert all(map(u.find_spec, ({modules},)))"
    try:
        return not subprocess.run([python, "-c", program], capture_output=True).returncode
    except OSError:
        return False


class PeerProcess:
    """A process that answers each line of requests with one line. A context manager."""

    def __init__(
        self,
        name: str,
        python: str,
        program: str,
        setup: pathlib.Path,
        threads: int,
    ):
        """Starts the process, offline.

        Args:
          name: the name of the process in errors.
          python: the path of a Python that has the libraries.
          program: the path of the program.
          setup: a file for the program. The process writes its errors beside this file.
          threads: threads of the libraries.
        """
        self._name = name
        self._errors = open(setup.parent / "errors.txt", "w+", encoding="utf-8")
        settings = {
            # Programs import what they share from the source tree.
            "PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "0",
        }
        self._process = subprocess.Popen(
            [python, program, str(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **settings},
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def ask(self, *fields: object) -> str:
        """Sends a request, and returns the line that answers it.

        Raises:
          UserError: the process ended.
        """
        assert self._process.stdin
        self._process.stdin.write("\t".join(map(str, fields)) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """Returns the next line that the process prints.

        Raises:
          UserError: the process ended.
        """
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["it printed nothing"]
            raise UserError(f"--peers_python: the process of {self._name} ended: {last[0]}")
        return line.rstrip("\n")
