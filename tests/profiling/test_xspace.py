# tests: wings/profiling/xspace.py, wings/profiling/trace.py
"""Tests traces of accelerators, as their profilers are documented to write them.

The traces are synthetic: planes, lines and names follow XProf's readers, see
https://github.com/openxla/xprof. No trace of a GPU or TPU was recorded.
"""

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from lingvo_gshard.wings.planning.operation_rows import ATTENTION, COLLECTIVES, PRODUCTS
from lingvo_gshard.wings.profiling import xspace
from lingvo_gshard.wings.profiling.summary import Summary
from lingvo_gshard.wings.profiling.trace import INPUT, STEP, Run
from tests.profiling.cpu_trace import HLO, NUMBER, PROGRAM, UNIT, Plane
from tests.profiling.test_summary import MICRO, facts

KEY = f"{PROGRAM}({NUMBER})"


def space(plane_name, *events, runs=()):
    """Returns a trace of a step from 0 to 100, of events (line, name, start, end, stats)."""
    made = xplane_pb2.XSpace()
    host = Plane(made, "/host:CPU")
    host.event("python", STEP, 0, 100, step_num=3)
    host.event("python", INPUT, 0, 10, step_num=3)
    # Threads of the host that launch operations are no devices.
    host.event("launcher", "dot.1", 0, 100, hlo_op="dot.1", hlo_module=PROGRAM)
    plane = Plane(made, plane_name)
    for start, end in runs:
        plane.event("XLA Modules", KEY, start, end)
    for line, name, start, end, stats in events:
        plane.event(line, name, start, end, **stats)
    Plane(made, "/host:metadata").program(KEY, HLO)
    return xspace.read(made.SerializeToString())


def times(trace):
    return {event.operation: (event.start // UNIT, event.end // UNIT) for event in trace.devices[0]}


def test_a_tpu_has_lines_of_operations_and_runs():
    trace = space(
        "/device:TPU:0",
        ("XLA Ops", "%dot.1 = f32[64,16]{1,0} dot(...)", 20, 40, {"display_name": "dot.1"}),
        ("XLA Ops", "%dot.2 = f32[64,16]{1,0} dot(...)", 40, 60, {}),
        ("Async XLA Ops", "%all-reduce.1 = f32[64,16]{1,0} all-reduce(...)", 50, 80, {}),
        ("Steps", "3", 20, 80, {}),
        runs=[(20, 80)],
    )
    assert times(trace) == {"dot.1": (20, 40), "dot.2": (40, 60), "all-reduce.1": (50, 80)}
    assert trace.runs[0] == [Run(KEY, 20 * UNIT, 80 * UNIT)]
    profile = Summary(trace, facts(1)).profile()
    seconds = {part.part: part.seconds for part in profile.parts}
    assert seconds[PRODUCTS] == pytest.approx(20 * MICRO)
    assert seconds[ATTENTION] == pytest.approx(20 * MICRO)
    assert seconds[COLLECTIVES] == pytest.approx(20 * MICRO)
    (collective,) = profile.collectives
    assert collective.hidden_seconds == pytest.approx(10 * MICRO)
    assert sum(seconds.values()) == pytest.approx(100 * MICRO)


def test_the_kernels_of_a_gpu_say_their_operation():
    of = {"hlo_module": PROGRAM, "program_id": NUMBER}
    trace = space(
        "/device:GPU:0",
        ("Stream #13(Compute)", "gemm_fusion_dot_1", 20, 40, {"hlo_op": "dot.1", **of}),
        ("Stream #13(Compute)", "loop_fusion", 45, 60, {"hlo_op": "exp.1", **of}),
        ("Stream #22(Comm)", "ncclDevKernel_AllReduce", 30, 70, {"hlo_op": "all-reduce.1", **of}),
        ("Stream #14(MemcpyH2D)", "MemcpyH2D", 0, 5, {}),
    )
    assert times(trace) == {"dot.1": (20, 40), "exp.1": (45, 60), "all-reduce.1": (30, 70)}
    (collective,) = Summary(trace, facts(1)).profile().collectives
    assert collective.seconds == pytest.approx(40 * MICRO)
    assert collective.hidden_seconds == pytest.approx((10 + 15) * MICRO)
    assert collective.exposed_seconds == pytest.approx((5 + 10) * MICRO)
