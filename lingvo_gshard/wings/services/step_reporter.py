"""StepReporter: tells the agent that started this process how far and how fast it is.

All processes of a cluster finish a step together, so the time of a step names no slow host. Two
times do: how long this host waits for its own batches, and how long its devices take for a fixed
computation of their own, a probe. The agent that leads compares both between hosts.
"""

from __future__ import annotations

import collections
import functools
import os
import statistics
import time
from collections.abc import Callable

from lingvo_gshard.core import Device, jax, processes
from lingvo_gshard.data import Batch
from lingvo_gshard.training import MetricsRow, ObservedRun, StepObserver
from lingvo_gshard.wings.cluster.worker_report import REPORT_FILE, report_step

_STEPS_OF_MEDIAN = 20
# The devices must be idle for a probe. So rarely, that costs nothing that could be measured.
_PROBE_EVERY = 50
# The fastest of a few: what else runs on a device only ever makes it slower.
_TRIES = 3
# Products of a probe, and the size of their matrices: about 10 milliseconds.
_PRODUCTS, _CPU_SIZE, _SIZE = 20, 256, 4096


class StepReporter(StepObserver):
    """Reports each finished step, and from time to time the speed of this host."""

    def __init__(self):
        self._began = time.monotonic()
        self._waits: collections.deque[float] = collections.deque(maxlen=_STEPS_OF_MEDIAN)
        self._probe_seconds: float | None = None

    def needs_idle(self, step: int) -> bool:
        """Returns whether the devices are probed before a step."""
        return processes.count() > 1 and step % _PROBE_EVERY == 2

    def while_idle(self, step: int) -> None:
        """Probes the devices of this process."""
        if self.needs_idle(step):
            self._probe_seconds = probe_seconds()

    def before_input(self, step: int) -> None:
        """Notes that the wait for a batch begins."""
        self._began = time.monotonic()

    def before_step(self, step: int, batch: Batch) -> None:
        """Notes that the batch is there."""
        self._waits.append(time.monotonic() - self._began)

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Reports a step."""
        report_step(step, statistics.median(self._waits), self._probe_seconds)


def reporter(run: ObservedRun) -> StepObserver | None:
    """Returns a reporter if an agent has started this process."""
    return StepReporter() if os.environ.get(REPORT_FILE) else None


def probe_seconds() -> float:
    """Returns how long the slowest device of this process takes for a fixed computation."""
    return max(map(_probe, jax.local_devices()))


@functools.cache
def _compiled_products() -> Callable:
    """Returns a function of a matrix. All probes share it, so that it is compiled once."""
    return jax.jit(lambda x: jax.lax.fori_loop(0, _PRODUCTS, lambda _, y: y @ x, x))


def _probe(device: Device) -> float:
    size = _CPU_SIZE if device.platform == "cpu" else _SIZE
    matrix = jax.device_put(jax.numpy.full((size, size), 1 / size, "bfloat16"), device)
    run = _compiled_products()
    run(matrix).block_until_ready()
    seconds = []
    for _ in range(_TRIES):
        began = time.monotonic()
        run(matrix).block_until_ready()
        seconds.append(time.monotonic() - began)
    return min(seconds)
