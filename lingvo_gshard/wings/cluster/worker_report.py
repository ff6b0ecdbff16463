"""WorkerReport: what a worker tells the agent that started it, in a small file.

The agent names the file in an environment variable. Without it, nothing is written. The file says
how far the worker is, how long the parts of its steps take, and why it ends. The agent reads it
while the worker runs and after the worker has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import os
import pathlib

import msgspec

from lingvo_gshard.core import atomic, regular

# The environment variable with the path of the file.
REPORT_FILE = "GSHARD_WORKER_REPORT"


class WorkerReport(msgspec.Struct):
    """The content of the file.

    Attributes:
      step: the last step that the worker finished; None if it finished none.
      input_seconds: median wait for a batch; None before the first.
      probe_seconds: time of a fixed computation on the host's slowest device; None before it.
      problem: why the worker ends; "" while it does not.
      is_consequence: whether it ends because another worker did.
    """

    step: int | None = None
    input_seconds: float | None = None
    probe_seconds: float | None = None
    problem: str = ""
    is_consequence: bool = False


# This process's report. A process has one run at a time.
_report = WorkerReport()


def report_problem(text: str, is_consequence: bool = False) -> None:
    """Reports why this process ends. Only the first reason counts.

    Args:
      is_consequence: whether another process is the reason.
    """
    if not _report.problem:
        _report.problem, _report.is_consequence = text, is_consequence
        _write()


def report_step(step: int, input_seconds: float, probe_seconds: float | None) -> None:
    """Reports a finished step.

    Args:
      input_seconds: median wait for a batch.
      probe_seconds: time of a fixed computation on the slowest device; None before the first.
    """
    _report.step, _report.input_seconds = step, input_seconds
    _report.probe_seconds = probe_seconds
    _write()


def read_report(path: pathlib.Path) -> WorkerReport:
    """Returns what a worker has reported so far; an empty report if there is none."""
    try:
        return atomic.decode(regular.read_regular(path), WorkerReport)
    except (OSError, msgspec.DecodeError):
        return WorkerReport()


def _write() -> None:
    path = os.environ.get(REPORT_FILE)
    if path:
        # A worker that cannot tell its agent trains all the same.
        with contextlib.suppress(OSError):
            atomic.replace_file(pathlib.Path(path), msgspec.json.encode(_report))
