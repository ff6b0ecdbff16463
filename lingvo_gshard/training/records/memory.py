"""Metrics of the memory that a run takes."""

from __future__ import annotations

import pathlib
import resource

from lingvo_gshard.training.monitoring.metrics import DEVICE_MEMORY, HOST_MEMORY, Row
from lingvo_gshard.training.runtime_protocol import Runtime

_STATUS = pathlib.Path("/proc/self/statm")


def memory_metrics(runtime: Runtime) -> Row:
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
