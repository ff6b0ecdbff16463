# tests: wings/profiling/timeline.py, wings/profiling/files.py
"""Tests the trace for Perfetto: times, layers, and rows without overlaps."""

import collections
import gzip
import json

import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.profiling import files, xspace
from lingvo_gshard.wings.profiling.timeline import StepProgram
from tests.profiling.cpu_trace import LAYERS, PROGRAM, CpuTrace


@pytest.fixture
def rows():
    trace = CpuTrace()
    trace.step(3, 50, 60, 200)
    trace.operation("dot.1", 70, 80, ready=100)
    trace.operation("dot.2", 80, 90, ready=120)
    trace.operation("sub.1", 110, 115)
    trace.operation("dot.1", 70, 90, device=3, thread="b")
    read = xspace.read(trace.write())
    module = read.module(read.devices[0][0].program)
    program = StepProgram(module, Mesh((("data", 1),)), LAYERS, {"attention": "attention"})
    return json.loads(gzip.decompress(files.encode(read, program)))["traceEvents"]


def test_times_are_microseconds_since_the_first_step(rows):
    first = next(row for row in rows if row["name"] == "dot.1")
    assert (first["ts"], first["dur"]) == (20, 30)
    step = next(row for row in rows if row["name"] == "train")
    assert (step["ts"], step["dur"], step["args"]) == (0, 150, {"step": 3})


def test_operations_tell_layer_and_kind(rows):
    (row,) = (row for row in rows if row["name"] == "dot.2")
    wanted = {"layer": "attention", "phase": "forward", "kind": "attention"}
    assert wanted.items() <= row["args"].items()
    assert row["args"]["program"].startswith(PROGRAM)


def test_rows_have_no_overlaps_and_names(rows):
    slices = collections.defaultdict(list)
    for row in rows:
        if row["ph"] == "X" and row["pid"] >= 100:
            slices[row["pid"], row["tid"]].append((row["ts"], row["ts"] + row["dur"]))
    assert sorted(map(len, slices.values())) == [1, 1, 2]
    for times in slices.values():
        assert all(end <= start for (_, end), (start, _) in zip(times, times[1:], strict=False))
    names = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert {names[key] for key in slices} == {"pool", "b"}
    assert names[103, 0] == "device 3"
