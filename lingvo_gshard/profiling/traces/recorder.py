"""Records the trace of a few steps, and measures their time by the host's own clock."""

from __future__ import annotations

import contextlib
import os
import time

from lingvo_gshard.profiling.steps import StepRange
from lingvo_gshard.profiling.traces.trace import INPUT, STEP
from lingvo_gshard.profiling.traces.tracer import Tracer


class Recorder:
    """Records the steps that it is told of.

    Attributes:
      seconds: time from the start of the first step to the end of the last one.
      core_seconds: processor time that the process used meanwhile.
      recorded: the recorded steps; None before the first.
    """

    def __init__(self, tracer: Tracer):
        """Makes a recorder that is not recording.

        Args:
          tracer: the tracer of the library that runs the steps.
        """
        self._tracer = tracer
        self._step, self._input = contextlib.ExitStack(), contextlib.ExitStack()
        self.seconds = self.core_seconds = 0.0
        self.recorded: StepRange | None = None
        self.is_recording = False

    def begin(self, step: int) -> None:
        """Notes that the loop starts to wait for the input of a step; the first call records."""
        if not self.is_recording:
            self._tracer.start()
            self.is_recording = True
            self._started, self._started_cores = time.perf_counter(), _core_seconds()
        self._step.close()
        self._step.enter_context(self._tracer.span(STEP, step))
        self._input.enter_context(self._tracer.span(INPUT, step))
        first = self.recorded.first if self.recorded else step
        self.recorded = StepRange(first, step)

    def start_step(self) -> None:
        """Notes that the input is there."""
        self._input.close()

    def end(self) -> bytes:
        """Ends the recording, when the last step is done. Returns the serialized trace."""
        self._input.close()
        self._step.close()
        self.seconds = time.perf_counter() - self._started
        self.core_seconds = _core_seconds() - self._started_cores
        self.is_recording = False
        return self._tracer.stop()


def _core_seconds() -> float:
    times = os.times()
    return times.user + times.system
