"""The files of a profile, in the folders where XProf and TensorBoard look for them.

docs/profiling.md lists them.

HOST.trace.json.gz is Chrome's JSON trace, which https://ui.perfetto.dev opens. Each device is a
process there. Rows of a process stand for the device's threads. An operation that another thread
finishes overlaps with the thread's next operation, so such a thread has several rows.
"""

from __future__ import annotations

import gzip
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import msgspec

from lingvo_gshard.core import processes
from lingvo_gshard.wings.planning.calibration import Calibration
from lingvo_gshard.wings.profiling.comparison import Comparison
from lingvo_gshard.wings.profiling.profile import Profile
from lingvo_gshard.wings.profiling.timeline import StepProgram, StepRange
from lingvo_gshard.wings.profiling.trace import Event, Trace

_MICROSECOND = 1e6
_HOST, _FIRST_DEVICE = 1, 100


def encode(trace: Trace, program: StepProgram) -> bytes:
    """Returns the trace as compressed JSON. Times start with the first step."""
    start, _ = trace.window
    events = [*_host(trace, start)]
    for device in sorted(trace.devices):
        events += _device(trace.devices[device], device, program, start)
    content = {"displayTimeUnit": "ms", "traceEvents": events}
    return gzip.compress(msgspec.json.encode(content), mtime=0)


def _host(trace: Trace, start: int) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _HOST, 0, "host")
    yield _named("thread_name", _HOST, 1, "training loop")
    for span in trace.host:
        arguments = {} if span.step is None else {"step": span.step}
        yield _slice(_HOST, 1, span.name, (span.start - start, span.end - start), arguments)


def _device(
    events: list[Event], device: int, program: StepProgram, start: int
) -> Iterator[dict[str, Any]]:
    process, rows = _FIRST_DEVICE + device, _TraceRows()
    yield _named("process_name", process, 0, f"device {device}")
    for event in events:
        row, is_new = rows.of(event)
        if is_new:
            yield _named("thread_name", process, row, event.thread)
        operation = program.find(event.operation)
        arguments = {
            "layer": operation.layer,
            "phase": operation.phase,
            "kind": program.kind(event.operation),
            "op_name": operation.op_name,
            "program": event.program,
        }
        times = event.start - start, event.end - start
        yield _slice(process, row, event.operation, times, arguments)


class _TraceRows:
    """Finds a row for each event, in the order of their starts."""

    def __init__(self):
        self._ends: dict[str, dict[int, int]] = {}
        self._count = 0

    def of(self, event: Event) -> tuple[int, bool]:
        """Returns the number of a row of the event's thread that is free, and whether it is new."""
        ends = self._ends.setdefault(event.thread, {})
        row = next((row for row, end in ends.items() if end <= event.start), None)
        is_new = row is None
        if row is None:
            self._count += 1
            row = self._count
        ends[row] = event.end
        return row, is_new


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    process: int, thread: int, name: str, times: tuple[int, int], arguments: dict[str, Any]
) -> dict[str, Any]:
    start, end = times
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start / _MICROSECOND,
        "dur": (end - start) / _MICROSECOND,
        "args": arguments,
    }


FOLDER = "profile"
SUMMARY, COMPARISON, CALIBRATION = "profile.json", "comparison.json", "calibration.json"


class ProfileFiles:
    """The folder of one profile. XProf and TensorBoard open `root`."""

    def __init__(self, directory: pathlib.Path, steps: StepRange):
        """Names the folder; nothing is written."""
        self.root = directory / FOLDER
        self.path = self.root / "plugins" / "profile" / f"steps_{steps.first}-{steps.last}"

    @property
    def _host(self) -> str:
        """The host's name, and the process's number if there are several."""
        name = socket.gethostname()
        return name if processes.count() == 1 else f"{name}_{processes.index()}"

    @property
    def xspace(self) -> pathlib.Path:
        """The trace of this process for XProf."""
        return self.path / f"{self._host}.xplane.pb"

    @property
    def perfetto(self) -> pathlib.Path:
        """The trace of this process for Perfetto."""
        return self.path / f"{self._host}.trace.json.gz"

    def write_trace(self, serialized: bytes) -> None:
        """Writes the trace as recorded."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.xspace.write_bytes(serialized)

    def write(self, name: str, record: Profile | Comparison | Calibration | None) -> None:
        """Writes a record to SUMMARY, COMPARISON or CALIBRATION, unless there is none."""
        if record is not None:
            (self.path / name).write_text(record.to_json(), encoding="utf-8")
