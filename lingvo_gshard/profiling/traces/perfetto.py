"""Writes a trace for Perfetto, with the layer, phase and kind of each operation.

The format is Chrome's JSON trace, which https://ui.perfetto.dev opens. Devices are its processes,
and streams or threads its threads.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import msgspec

from lingvo_gshard.profiling.step_program import StepProgram
from lingvo_gshard.profiling.traces.trace import Trace

_PICOSECONDS = 1e6
_HOST = 1
_FIRST_DEVICE = 100


def encode(trace: Trace, program: StepProgram) -> bytes:
    """Returns the trace as compressed JSON. Times start with the first step.

    Args:
      trace: the trace.
      program: the compiled training step.
    """
    events = [*_host(trace), *_devices(trace, program)]
    content = {"displayTimeUnit": "ms", "traceEvents": events}
    return gzip.compress(msgspec.json.encode(content), mtime=0)


def _host(trace: Trace) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _HOST, 0, "host")
    yield _named("thread_name", _HOST, 1, "training loop")
    for span in trace.host:
        arguments = {} if span.step is None else {"step": span.step}
        yield _event(trace, _HOST, 1, span.name, span.start, span.end, arguments)


def _devices(trace: Trace, program: StepProgram) -> Iterator[dict[str, Any]]:
    for device, events in sorted(trace.devices.items()):
        process = _FIRST_DEVICE + device
        yield _named("process_name", process, 0, f"device {device}")
        threads: dict[str, int] = {}
        for event in events:
            if event.thread not in threads:
                threads[event.thread] = len(threads) + 1
                yield _named("thread_name", process, threads[event.thread], event.thread)
            operation = program.find(event.operation)
            arguments = {
                "layer": operation.layer,
                "phase": operation.phase,
                "kind": program.kind(event.operation),
                "op_name": operation.op_name,
                "program": event.program,
            }
            thread = threads[event.thread]
            yield _event(trace, process, thread, event.operation, event.start, event.end, arguments)


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(
    trace: Trace,
    process: int,
    thread: int,
    name: str,
    start: int,
    end: int,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": (start - trace.window[0]) / _PICOSECONDS,
        "dur": (end - start) / _PICOSECONDS,
        "args": arguments,
    }
