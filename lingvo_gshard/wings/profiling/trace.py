"""Traces as data: what each device executed and what the host did. Times are in picoseconds.

Each library traces only what it executes itself. Both write XSpace files.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lingvo_gshard.core import UserError, jax, objects, tf
from lingvo_gshard.wings.hlo.module import Module
from lingvo_gshard.wings.planning.machines import chips
from lingvo_gshard.wings.profiling.timeline import StepRange

# Names of our own spans on the host's main thread. XProf divides a trace by spans named "train".
STEP, INPUT = "train", "wait for input"
# A module is an executed program if it has at least this share of the executed instructions.
_LEAST_COVERAGE = 0.5


class Event(NamedTuple):
    """One execution of an operation, an HLO instruction, by a thread or stream of a device."""

    program: str
    operation: str
    start: int
    end: int
    thread: str = ""


class Span(NamedTuple):
    """A piece of work of the host's main thread; only `STEP` and `INPUT` have a step."""

    name: str
    start: int
    end: int
    step: int | None = None


class Run(NamedTuple):
    """One execution of a program on a device, from its first operation to its last."""

    program: str
    start: int
    end: int


@dataclasses.dataclass
class Trace:
    """The events of a recorded trace.

    Attributes:
      devices: the executed operations of each device, by its number, in the order of their starts.
      programs: the serialized HloProto of each program, by its key.
    """

    devices: dict[int, list[Event]]
    runs: dict[int, list[Run]]
    host: list[Span]
    programs: dict[str, bytes]

    def spans(self, name: str) -> list[Span]:
        """Returns the host's spans of a name, in the order of their starts."""
        return sorted((span for span in self.host if span.name == name), key=lambda s: s.start)

    @functools.cached_property
    def window(self) -> tuple[int, int]:
        """Start of the first step and end of the last one. Raises UserError if there is no step."""
        steps = self.spans(STEP)
        if not steps:
            raise UserError("the trace has no training steps")
        return steps[0].start, max(span.end for span in steps)

    def module(self, program: str) -> Module | None:
        """Returns a compiled program as data; None if the trace does not have it.

        Executables that jax reads from its cache are executed under another number than their HLO
        has. The module is therefore the one that has most of the executed instructions.
        """
        executed = self.executed.get(program, set())
        found, most = None, _LEAST_COVERAGE * len(executed)
        for key, (module, names) in self._modules.items():
            covered = len(executed & names)
            if covered > most or (covered == most and key == program):
                found, most = module, covered
        return found

    @functools.cached_property
    def executed(self) -> dict[str, set[str]]:
        """The names of the executed instructions of each program."""
        names: dict[str, set[str]] = {}
        for events in self.devices.values():
            for event in events:
                names.setdefault(event.program, set()).add(event.operation)
        return names

    @functools.cached_property
    def _modules(self) -> dict[str, tuple[Module, frozenset[str]]]:
        """The programs as data, with the names of their instructions."""
        found = {}
        for key, serialized in self.programs.items():
            module = Module.from_hlo(serialized)
            names = frozenset().union(*(each.by_name for each in module.computations))
            found[key] = module, names
        return found


class Tracer(abc.ABC):
    """Records what one library executes, a trace at a time."""

    def start(self) -> None:
        """Starts to record."""
        self._directory = tempfile.TemporaryDirectory(prefix="profile")
        self._start(self._directory.name)

    def stop(self) -> bytes:
        """Stops and returns the trace as a serialized XSpace."""
        with self._directory:
            self._stop()
            (path,) = pathlib.Path(self._directory.name).rglob("*.xplane.pb")
            return objects.read_bytes(path)

    def chip_key(self) -> str:
        """Returns the chip's key in planning/machines, "cpu" for CPUs, "" for unknown chips."""
        platform, kind = self._device()
        if platform == "cpu":
            return platform
        chip = chips.of_device(platform, kind)
        return chip.key if chip else ""

    @abc.abstractmethod
    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context that the trace shows as a span of the host."""

    @abc.abstractmethod
    def product(self, size: int) -> Callable[[], object] | None:
        """Returns a call that computes a float32 product on one device; None without any."""

    @abc.abstractmethod
    def _start(self, directory: str) -> None:
        """Starts the library's profiler, which writes to a directory."""

    @abc.abstractmethod
    def _stop(self) -> None:
        """Stops the library's profiler."""

    @abc.abstractmethod
    def _device(self) -> tuple[str, str]:
        """Returns platform and kind of the first device, as `chips.of_device` takes them."""


def matrix(size: int) -> np.ndarray:
    """Returns a square float32 matrix of random numbers."""
    return np.random.default_rng(0).standard_normal((size, size), np.float32)


# Operations of programs are recorded at this level, each call of Python is not.
_HOST_LEVEL = 2


class JaxTracer(Tracer):
    """Records what jax executes."""

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        return jax.profiler.StepTraceAnnotation(name, step_num=step)

    def product(self, size: int) -> Callable[[], object]:
        x = jax.device_put(matrix(size), jax.local_devices()[0])
        product = jax.jit(lambda x: x @ x)
        return lambda: jax.block_until_ready(product(x))

    def _start(self, directory: str) -> None:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = _HOST_LEVEL
        options.python_tracer_level = 0
        jax.profiler.start_trace(directory, profiler_options=options)

    def _stop(self) -> None:
        jax.profiler.stop_trace()

    def _device(self) -> tuple[str, str]:
        device = jax.devices()[0]
        return device.platform, device.device_kind


class Recorder:
    """Records the steps between the first call of `begin` and `end`.

    Attributes:
      seconds: time from the start of the first step to the end of the last step.
      core_seconds: processor time that the process used meanwhile.
      recorded: the recorded steps; None before the first.
    """

    def __init__(self, tracer: Tracer):
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
            self._started, self._started_cores = time.perf_counter(), time.process_time()
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
        self.core_seconds = time.process_time() - self._started_cores
        self.is_recording = False
        return self._tracer.stop()


class TensorFlowTracer(Tracer):
    """Records what TensorFlow executes."""

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        return tf.profiler.experimental.Trace(name, step_num=step, _r=1)

    def product(self, size: int) -> Callable[[], object] | None:
        if tf.config.list_logical_devices("TPU"):
            return None
        x = tf.constant(matrix(size))
        product = tf.function(lambda x: tf.matmul(x, x), jit_compile=True)
        # Reading one element waits for the product and copies little.
        return lambda: product(x)[0, 0].numpy()

    def _start(self, directory: str) -> None:
        # TensorFlow's default options equal the options of JaxTracer. Other options cause warnings.
        tf.profiler.experimental.start(directory)

    def _stop(self) -> None:
        tf.profiler.experimental.stop()

    def _device(self) -> tuple[str, str]:
        gpus = tf.config.list_physical_devices("GPU")
        if tf.config.list_logical_devices("TPU"):
            return "tpu", ""
        if not gpus:
            return "cpu", ""
        details = tf.config.experimental.get_device_details(gpus[0])
        return "gpu", details.get("device_name", "")
