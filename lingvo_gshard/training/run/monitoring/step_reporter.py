"""StepReporter: tells the agent that started this process, if any, how far it is."""

from __future__ import annotations

import collections
import statistics
import time

from lingvo_gshard.training.run.monitoring.metrics import MetricsRow
from lingvo_gshard.training.run.monitoring.step_observer import StepObserver
from lingvo_gshard.training.run.monitoring.worker_report import report_step

_STEPS_OF_MEDIAN = 20


class StepReporter(StepObserver):
    """Reports each finished step, and how long the host's own part of steps takes."""

    def __init__(self):
        self._began = time.monotonic()
        self._own: collections.deque[float] = collections.deque(maxlen=_STEPS_OF_MEDIAN)

    def before_input(self, step: int) -> None:
        """Notes that the host's own part of a step begins."""
        self._began = time.monotonic()

    def before_result(self, step: int) -> None:
        """Notes that the host's own part of a step is over."""
        self._own.append(time.monotonic() - self._began)

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Reports a step."""
        report_step(step, statistics.median(self._own))
