"""Reads traces from XSpace, the file format of XProf and of TensorBoard's profile plugin.

jax and TensorFlow both write it, with the same messages:
https://github.com/openxla/xla/blob/main/third_party/tsl/tsl/profiler/protobuf/xplane.proto.
A file has a plane for the host, one for each accelerator, and one with the compiled programs. On a
CPU, the operations are on the lines of the host's threads, and say their program and device.
"""

from __future__ import annotations

import bisect
import collections
import re
from collections.abc import Iterator
from typing import Any

from lingvo_gshard.core import objects
from lingvo_gshard.wings.hlo import messages
from lingvo_gshard.wings.profiling.trace import INPUT, STEP, Event, Run, Span, Trace

XSpace = messages.read(objects.text_beside(__file__, "trace.textproto"))["XSpace"]


_HOST_PLANE, _PROGRAMS_PLANE = "/host:CPU", "/host:metadata"
_DEVICE_PLANE = re.compile(r"/device:(?!CUSTOM)\w+:(\d+)")
# The lines of an accelerator's plane that have its operations, and its executions of programs.
_OPERATION_LINES = ("XLA Ops", "Async XLA Ops")
_RUN_LINE = "XLA Modules"
# XLA's CPU runtime marks the completion of an operation by a second event, joined by a number.
_END, _PRODUCER, _CONSUMER = "end: ", "_p", "_c"
# Events of thread pools, several for each operation.
_NOISE = "ThreadpoolListener"
_NO_RUN = -1
_LONG_NAME = re.compile(r"%?([^ ]+) = .*", re.DOTALL)


def read(serialized: bytes) -> Trace:
    """Returns the trace of a serialized XSpace."""
    planes = {p.name: _Plane(p) for p in XSpace.FromString(serialized).planes}
    programs = dict(_programs(planes[_PROGRAMS_PLANE])) if _PROGRAMS_PLANE in planes else {}
    host = list(_host_spans(planes[_HOST_PLANE])) if _HOST_PLANE in planes else []
    accelerators = {
        int(match[1]): plane
        for name, plane in planes.items()
        if (match := _DEVICE_PLANE.fullmatch(name))
    }
    trace = Trace({}, {}, host, programs)
    for device, plane in accelerators.items():
        trace.runs[device] = sorted(_accelerator_runs(plane), key=lambda run: run.start)
        events = _accelerator_events(plane, trace.runs[device])
        trace.devices[device] = sorted(events, key=lambda event: event.start)
    if not accelerators and _HOST_PLANE in planes:
        _read_cpu(planes[_HOST_PLANE], trace)
    return trace


class _Plane:
    """A plane of an XSpace, with its tables resolved."""

    def __init__(self, plane: Any):
        self.lines = plane.lines
        self.metadata = plane.event_metadata
        self._names = {identifier: stat.name for identifier, stat in plane.stat_metadata.items()}

    def stats(self, holder: Any) -> dict[str, Any]:
        """Returns the values of an event, or those that all events of one kind share, by name."""
        found = {}
        for stat in holder.stats:
            field = stat.WhichOneof("value")
            value = getattr(stat, field) if field else None
            name = self._names[stat.metadata_id]
            found[name] = self._names[value] if field == "ref_value" else value
        return found


def _times(line: Any, event: Any) -> tuple[int, int]:
    start = line.timestamp_ns * 1000 + event.offset_ps
    return start, start + event.duration_ps


def _key(name: str, identifier: int | None) -> str:
    """Returns a program's key, as the plane of programs spells it."""
    return name if identifier is None else f"{name}({identifier})"


def _programs(plane: _Plane) -> Iterator[tuple[str, bytes]]:
    """Yields key and serialized HloProto of each program."""
    for metadata in plane.metadata.values():
        for value in plane.stats(metadata).values():
            if isinstance(value, bytes):
                yield metadata.name, value


def _host_spans(plane: _Plane) -> Iterator[Span]:
    """Yields what the thread did that runs the training loop."""
    steps = {i for i, metadata in plane.metadata.items() if metadata.name in (STEP, INPUT)}
    for line in plane.lines:
        if not any(event.metadata_id in steps for event in line.events):
            continue
        for event in line.events:
            name = plane.metadata[event.metadata_id].name
            if not name.startswith(_NOISE):
                step = plane.stats(event).get("step_num") if event.metadata_id in steps else None
                yield Span(name, *_times(line, event), step)


def _read_cpu(plane: _Plane, trace: Trace) -> None:
    """Reads the operations of CPU devices from the lines of the host's threads."""
    ends: dict[int | None, int] = {}
    found: list[tuple[int, int, int | None, Event]] = []
    for line in plane.lines:
        for event in line.events:
            name = plane.metadata[event.metadata_id].name
            if name.startswith(_NOISE) or not event.stats:
                continue
            start, end = _times(line, event)
            stats = plane.stats(event)
            if name.startswith(_END):
                ends[stats.get(_CONSUMER)] = end
            elif "hlo_op" in stats:
                program = _key(stats.get("hlo_module", ""), stats.get("program_id"))
                thread = line.display_name or line.name
                executed = Event(program, stats["hlo_op"], start, end, thread)
                device = max(0, stats.get("device_ordinal", 0))
                found.append((device, stats.get("run_id", _NO_RUN), stats.get(_PRODUCER), executed))
    runs: dict[tuple, list[Event]] = collections.defaultdict(list)
    steps = [span.start for span in trace.spans(STEP)]
    for device, run, producer, event in found:
        event = event._replace(end=ends.get(producer, event.end))
        trace.devices.setdefault(device, []).append(event)
        # The runtime for a single device does not number its runs. It has one run in each step.
        number = bisect.bisect(steps, event.start) if run == _NO_RUN else run
        runs[device, event.program, number].append(event)
    for (device, program, _), events in runs.items():
        run = Run(program, min(e.start for e in events), max(e.end for e in events))
        trace.runs.setdefault(device, []).append(run)
    for events in trace.devices.values():
        events.sort(key=lambda event: event.start)


def _accelerator_runs(plane: _Plane) -> Iterator[Run]:
    for line in plane.lines:
        if line.name == _RUN_LINE:
            for event in line.events:
                yield Run(plane.metadata[event.metadata_id].name, *_times(line, event))


def _accelerator_events(plane: _Plane, runs: list[Run]) -> Iterator[Event]:
    """Yields the operations of an accelerator.

    TPUs, and GPUs after XProf has read the file, have lines of operations. Otherwise, the kernels
    on a GPU's streams say which operation they belong to.
    """
    has_lines = any(line.name in _OPERATION_LINES for line in plane.lines)
    starts = [run.start for run in runs]
    for line in plane.lines:
        if has_lines and line.name not in _OPERATION_LINES:
            continue
        for event in line.events:
            metadata = plane.metadata[event.metadata_id]
            stats = plane.stats(metadata) | plane.stats(event)
            if not has_lines and "hlo_op" not in stats:
                continue
            start, end = _times(line, event)
            name = stats.get("hlo_op") or metadata.display_name or metadata.name
            index = bisect.bisect(starts, start) - 1
            program = runs[index].program if index >= 0 and start < runs[index].end else ""
            if "hlo_module" in stats:
                program = _key(stats["hlo_module"], stats.get("program_id"))
            yield Event(program, _LONG_NAME.sub(r"\1", name), start, end, line.name)
