"""HealthCheck: gshard-doctor on a host that has failed, before the host takes part again."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from lingvo_gshard.wings.agents.worker import start_process

# A device that hangs is no healthier than one that computes wrong results.
_LONGEST = 600.0
# Who repairs a host need not start its agent again.
_AGAIN_SECONDS = 600.0
_FAILURE = "failure"


class HealthCheck:
    """The check of one host: whether it runs, and what it found.

    Attributes:
      keeps_out: whether the host takes no part, since the check runs or has found a failure.
    """

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        say: Callable[[str], None],
        on_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepares a check.

        Args:
          command: takes the path of a file and returns the command of a check that writes to it.
          on_end: called in a thread when the check has ended.
          clock: returns seconds.
        """
        self.keeps_out = False
        self._command, self._say, self._on_end, self._clock = command, say, on_end, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._changed = 0.0

    def begin(self) -> None:
        """Starts the check, unless it runs. The devices of the host must be free."""
        if self._process is not None:
            return
        self.keeps_out, self._changed = True, self._clock()
        self._folder = tempfile.TemporaryDirectory(prefix="gshard-check-")
        quiet = subprocess.DEVNULL
        command = self._command(str(self._report))
        self._process = start_process(command, {}, stdin=quiet, stdout=quiet, stderr=quiet)
        threading.Thread(target=self._wait, args=[self._process], daemon=True).start()

    def poll(self) -> None:
        """Notes the end of the check; begins again some time after a check that failed."""
        age = self._clock() - self._changed
        if self._process is None:
            if self.keeps_out and age > _AGAIN_SECONDS:
                self.begin()
            return
        code = self._process.poll()
        if code is None and age < _LONGEST:
            return
        problem = f"does not end within {_LONGEST:g} s" if code is None else self._problem(code)
        self.close()
        self.keeps_out, self._changed = problem is not None, self._clock()
        if problem is None:
            self._say("gshard-doctor finds no failure: the host takes part again")
        else:
            self._say(
                f"Warning: the host takes no part, since gshard-doctor {problem}; "
                f"it is checked again in {_AGAIN_SECONDS:g} s"
            )

    def close(self) -> None:
        """Ends the check if it runs."""
        if self._process is None or self._folder is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()
        self._process = None

    @property
    def _report(self) -> pathlib.Path:
        assert self._folder is not None
        return pathlib.Path(self._folder.name) / "checks.json"

    def _problem(self, code: int) -> str | None:
        """Returns what a check that has ended found, as a verb phrase; None if nothing."""
        if code == 0:
            return None
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            checks = json.loads(self._report.read_bytes())["checks"]
            found = [one for one in checks if one["state"] == _FAILURE]
            if found:
                return "finds: " + "; ".join(f"{one['name']}: {one['found']}" for one in found)
        return f"ends with code {code}"

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._on_end()
