"""The memory of a run in its metrics."""

from __future__ import annotations

import pathlib
import resource
from typing import Any

from lingvo_gshard.training import DEVICE_MEMORY, HOST_MEMORY, MetricsRow, ObservedRun, StepObserver
from lingvo_gshard.wings.services.runtime import DeviceRuntime

_STATUS = pathlib.Path("/proc/self/statm")


def memory_metrics(runtime: DeviceRuntime) -> MetricsRow:
    """Returns the memory of this process, and of the fullest of its devices.

    Returns:
      host_memory_bytes: memory of the process that is in RAM now.
      peak_device_memory_bytes: the most that was ever in use on a device; missing for CPUs.
    """
    row = {HOST_MEMORY: float(resident_bytes())}
    peak = runtime.peak_device_memory()
    return row if peak is None else {**row, DEVICE_MEMORY: float(peak)}


def resident_bytes() -> int:
    """Returns the memory of this process that is in RAM now."""
    # The second number is the resident set, in pages.
    return int(_STATUS.read_bytes().split()[1]) * resource.getpagesize()


class Memory(StepObserver):
    """Adds the memory of the process and its devices to each row."""

    def __init__(self, run: ObservedRun):
        self._runtime: Any = run.runtime

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Adds the metrics."""
        row.update(memory_metrics(self._runtime))
