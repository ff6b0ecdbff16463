"""Worker: the process that an agent starts for one round, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import EXIT_CODES
from lingvo_gshard.wings.agents.records import KILLED, Outcome
from lingvo_gshard.wings.agents.spare import Spare, module_of
from lingvo_gshard.wings.cluster.worker_report import REPORT_FILE, WorkerReport, read_report
from lingvo_gshard.wings.services.run_lock import state_and_ticks

# Linux, sys/prctl.h: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
# A worker with this state in /proc/PID/stat was stopped by a signal and computes nothing.
_STOPPED_STATES = ("T", "t")


class Worker:
    """A worker of one round. Made in the main thread, whose end also ends the worker.

    Attributes:
      module: the Python module that it runs; None if it runs another program.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        round_: int,
        on_end: Callable[[], None],
        spare: Spare | None = None,
    ):
        """Starts the process.

        Args:
          environment: variables to add to the variables of this process.
          on_end: called in a thread when the process has ended.
          spare: a process that becomes the worker if it can.

        Raises:
          OSError: it cannot be started.
        """
        self.round, self.module = round_, module_of(command)
        self._folder = tempfile.TemporaryDirectory(prefix="gshard-worker-")
        self._report = pathlib.Path(self._folder.name) / "report.json"
        self._reason, self._is_stopping = "", False
        self._started = time.monotonic()
        self._stopped_since: float | None = None
        variables = {**environment, REPORT_FILE: str(self._report)}
        warm = spare.run(command, variables) if spare else None
        self._process = warm or start_process(command, variables)
        threading.Thread(target=self._wait, args=[on_end], daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def report(self) -> WorkerReport:
        """The newest report of the worker."""
        return read_report(self._report)

    @property
    def outcome(self) -> Outcome:
        """The end of the process. Valid when the process is not running."""
        code, report = self._process.returncode, self.report
        if self._is_stopping and code == -signal.SIGTERM:
            # The process had no handler, since it was just beginning or had just saved.
            code = EXIT_CODES["SIGTERM"]
        problem = self._reason or report.problem
        is_consequence = report.is_consequence and not self._reason
        return Outcome(self.round, code, report.step, problem, is_consequence)

    def stop(self) -> bool:
        """Asks the worker to finish its step, save and end. Returns False if it was asked before.

        A second request would end it without saving.
        """
        if self._is_stopping:
            return False
        self._is_stopping = True
        # Not its group: a reader of data that ended would be an error in the middle of a step.
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        return True

    def kill(self, reason: str = "") -> None:
        """Ends the worker and all that it started, at once.

        Args:
          reason: the problem to record in the outcome; "" leaves the reported one.
        """
        self._reason = self._reason or reason
        self._end_group()
        self._process.wait()

    def check(self, start_seconds: float, stopped_seconds: float) -> None:
        """Ends a worker that was stopped by a signal, or that never ends its first step.

        Args:
          start_seconds: how long the first step may take.
          stopped_seconds: how long the process may be stopped.
        """
        now = time.monotonic()
        if not self._is_stopped():
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > stopped_seconds:
            self.kill(f"a signal stopped it for {stopped_seconds:g} s")
        if now - self._started > start_seconds and self.report.step is None and self.is_running:
            self.kill(f"it finished no step within {start_seconds:g} s")

    def close(self) -> None:
        """Removes the files of a worker that has ended."""
        self._folder.cleanup()

    def _wait(self, on_end: Callable[[], None]) -> None:
        self._process.wait()
        # Children of the worker, such as readers of data, must not hold its devices.
        self._end_group()
        on_end()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _is_stopped(self) -> bool:
        found = state_and_ticks(self._process.pid)
        return found is not None and found[0] in _STOPPED_STATES


def start_process(
    command: Sequence[str], environment: Mapping[str, str], **given: Any
) -> subprocess.Popen:
    """Starts a process that is killed when this thread ends, however that happens.

    Args:
      environment: variables to add to the variables of this process.
      **given: what `subprocess.Popen` takes besides, such as streams.

    Raises:
      OSError: it cannot be started.
    """
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        # A scheduler signals this process's group. This process decides what the other one gets.
        start_new_session=True,
        preexec_fn=functools.partial(_begin, os.getpid()),
        **given,
    )


def words_of(outcome: Outcome) -> str:
    """Returns how a worker ended, as a verb phrase."""
    if outcome.problem:
        return f"ended: {outcome.problem}"
    if outcome.code < 0:
        with contextlib.suppress(ValueError):
            return f"{KILLED} {signal.Signals(-outcome.code).name}"
    return f"ended with exit code {outcome.code}"


def _begin(parent: int) -> None:
    """Has a new process end with its parent, and leave the warning of a scheduler to it."""
    # Slurm sends it to all processes of a job. The agent passes it on as a request to stop.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The parent has ended before.
            os._exit(1)
