"""Records the trace of a few steps, whichever library runs them. All tracers write XSpace files."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.planning.machines import chips
from lingvo_gshard.profiling.steps import StepRange
from lingvo_gshard.profiling.trace import INPUT, STEP


class Tracer(Protocol):
    """Records a trace at a time."""

    def start(self) -> None:
        """Starts to record."""
        ...

    def stop(self) -> bytes:
        """Stops and returns the trace as a serialized XSpace."""
        ...

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context that the trace shows as a span of the host."""
        ...

    def chip_key(self) -> str:
        """Returns the chip's key in planning/machines, "cpu" for CPUs, "" for unknown chips."""
        ...

    def product(self, size: int) -> Callable[[], object] | None:
        """Returns a call that computes a float32 product of square matrices on one device.

        Args:
          size: their rows and columns.

        Returns:
          None if the library cannot compute on a single device.
        """
        ...


def matrix(size: int) -> np.ndarray:
    """Returns a square float32 matrix of random numbers."""
    return np.random.default_rng(0).standard_normal((size, size), np.float32)


def only_trace(directory: str) -> bytes:
    """Returns the only trace in a directory, a serialized XSpace."""
    (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
    return path.read_bytes()


# Operations of programs are recorded at this level, each call of Python is not.
_HOST_LEVEL = 2


class JaxTracer:
    """Records what jax executes."""

    def start(self) -> None:
        """Starts to record."""
        self._directory = tempfile.TemporaryDirectory(prefix="profile")
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = _HOST_LEVEL
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._directory.name, profiler_options=options)

    def stop(self) -> bytes:
        """Stops and returns the trace as a serialized XSpace."""
        with self._directory:
            jax.profiler.stop_trace()
            return only_trace(self._directory.name)

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context that the trace shows as a span of the host."""
        return jax.profiler.StepTraceAnnotation(name, step_num=step)

    def chip_key(self) -> str:
        """Returns the chip's key in planning/machines, "cpu" for CPUs, "" for unknown chips."""
        device = jax.devices()[0]
        if device.platform == "cpu":
            return "cpu"
        chip = chips.of_device(device.platform, device.device_kind)
        return chip.key if chip else ""

    def product(self, size: int) -> Callable[[], object]:
        """Returns a call that computes a float32 product of square matrices on one device."""
        x = jax.device_put(matrix(size), jax.local_devices()[0])
        product = jax.jit(lambda x: x @ x)
        return lambda: jax.block_until_ready(product(x))


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
