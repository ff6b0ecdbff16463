"""Compares the profile of a small trace with sums by hand."""

import math

import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.planning.operation_rows import (
    ATTENTION,
    COLLECTIVES,
    OPTIMIZER,
    OTHER,
    PRODUCTS,
)
from lingvo_gshard.wings.profiling import xspace
from lingvo_gshard.wings.profiling.profile import HOST, INPUT_WAIT, OTHER_PROGRAMS, PAUSES, Rate
from lingvo_gshard.wings.profiling.summary import StepFacts, Summary
from lingvo_gshard.wings.profiling.timeline import StepRange
from tests.profiling.cpu_trace import LAYERS, PRODUCT_FLOPS, CpuTrace

MICRO = 1e-6


def facts(count, devices=1):
    return StepFacts(
        name="an.experiment",
        steps=StepRange(3, 2 + count),
        device_summary="some devices",
        chip="cpu",
        mesh=Mesh((("data", devices),)),
        layers=LAYERS,
        kinds={"attention": ATTENTION},
        busy_cores=1.5,
        cores=2,
        useful_flops=1000,
        tokens_per_step=64,
        attainable=Rate(flops_per_second=1e9, source="a test"),
        source_of=lambda name: f"line of {name}",
    )


def one_step(trace, start, wait, device=0, run=1):
    """Adds a step of 100 microseconds that waits for `wait` of them."""
    at = start + wait
    trace.operation("dot.1", at + 2, at + 12, device=device, run=run)
    # The attention's product and the all-reduce overlap from 15 to 25.
    trace.operation("dot.2", at + 12, at + 25, device=device, run=run)
    trace.operation("all-reduce.1", at + 15, at + 17, "c", device, run, ready=at + 35)
    # Two operations at the same time, then a pause of 5.
    trace.operation("exp.1", at + 35, at + 41, device=device, run=run)
    trace.operation("add.1", at + 35, at + 41, "b", device=device, run=run)
    trace.operation("sub.1", at + 46, at + 50, device=device, run=run)


def profile_of(trace, count, **options):
    read = xspace.read(trace.write())
    return Summary(read, facts(count, **options)).profile()


def seconds(profile):
    return {part.part: part.seconds for part in profile.parts}


def test_the_parts_of_a_step():
    trace = CpuTrace()
    trace.step(3, 0, 8, 100)
    one_step(trace, 0, 8)
    trace.step(4, 100, 130, 200)
    one_step(trace, 100, 30, run=2)
    profile = profile_of(trace, 2)
    assert seconds(profile) == pytest.approx(
        {
            PRODUCTS: 10 * MICRO,
            ATTENTION: 13 * MICRO,
            COLLECTIVES: 10 * MICRO,
            OPTIMIZER: (3 + 4) * MICRO,
            OTHER: 3 * MICRO,
            PAUSES: 5 * MICRO,
            INPUT_WAIT: (8 + 30) / 2 * MICRO,
            HOST: ((2 + 42) + (2 + 20)) / 2 * MICRO,
        }
    )
    total = sum(seconds(profile).values())
    assert total == pytest.approx(profile.seconds_per_step)
    assert math.fsum(part.share for part in profile.parts) == pytest.approx(1)


def test_rates_and_layers():
    trace = CpuTrace()
    trace.step(3, 0, 0, 100)
    one_step(trace, 0, 0)
    profile = profile_of(trace, 1)
    rates = {part.part: part.flops_per_second for part in profile.parts}
    assert rates[PRODUCTS] == pytest.approx(PRODUCT_FLOPS / 10e-6)
    assert rates[ATTENTION] == pytest.approx(PRODUCT_FLOPS / 13e-6)
    assert rates[OPTIMIZER] is None
    assert profile.executed_flops == 2 * PRODUCT_FLOPS
    layers = {(row.layer, row.phase): row.seconds for row in profile.layers}
    assert layers == pytest.approx(
        {
            ("attention", "forward"): 13 * MICRO,
            ("ffn", "forward"): 10 * MICRO,
            ("ffn", "backward"): 10 * MICRO,
            ("", "optimizer"): 7 * MICRO,
            ("norm", "forward"): 3 * MICRO,
        }
    )
    slowest = profile.slowest[0]
    assert (slowest.name, slowest.layer, slowest.executions) == ("dot.2", "attention", 1)
    assert slowest.source == "line of attention/einsum/Einsum"


def test_hidden_and_exposed_communication():
    trace = CpuTrace()
    trace.step(3, 0, 0, 100)
    one_step(trace, 0, 0)
    (row,) = profile_of(trace, 1).collectives
    assert (row.kind, row.count, row.bytes) == ("all-reduce", 1, 64 * 16 * 4)
    assert row.seconds == pytest.approx(20 * MICRO)
    assert row.hidden_seconds == pytest.approx(10 * MICRO)
    assert row.exposed_seconds == pytest.approx(10 * MICRO)


def test_two_devices_are_told_apart_and_averaged():
    trace = CpuTrace()
    trace.step(3, 0, 10, 100)
    trace.operation("dot.1", 10, 30, device=0)
    trace.operation("dot.1", 10, 70, thread="b", device=1)
    profile = profile_of(trace, 1, devices=2)
    assert [row.seconds[PRODUCTS] for row in profile.per_device] == pytest.approx([2e-5, 6e-5])
    assert seconds(profile)[PRODUCTS] == pytest.approx(40 * MICRO)
    assert profile.useful_flops == 1000
    for row in profile.per_device:
        assert sum(row.seconds.values()) == pytest.approx(100 * MICRO)


def test_workers_with_a_copy_of_the_step_each_are_one_step():
    trace = CpuTrace()
    trace.step(3, 0, 0, 100)
    for device, number in enumerate((5, 6)):
        trace.operation("dot.1", 10, 30, thread=str(device), device=device, number=number)
    found = seconds(profile_of(trace, 1, devices=2))
    assert found[PRODUCTS] == pytest.approx(20 * MICRO)
    assert OTHER_PROGRAMS not in found


def test_other_programs_in_between_count_apart():
    trace = CpuTrace()
    trace.step(3, 0, 0, 100)
    one_step(trace, 0, 0)
    trace.other_program(60, 90)
    assert seconds(profile_of(trace, 1))[OTHER_PROGRAMS] == pytest.approx(30 * MICRO)


def test_a_cached_program_that_runs_under_another_number_is_found():
    trace = CpuTrace()
    trace.step(3, 0, 0, 100)
    one_step(trace, 0, 0)
    read = xspace.read(trace.write(key="jit_call(77)"))
    profile = Summary(read, facts(1)).profile()
    assert seconds(profile)[ATTENTION] == pytest.approx(13 * MICRO)


def test_an_input_bound_run_is_named_with_what_to_do():
    trace = CpuTrace()
    trace.step(3, 0, 300, 400)
    one_step(trace, 0, 300)
    first, advice = profile_of(trace, 1).findings
    assert first == "Largest part: input wait, 75% of the step."
    assert advice.startswith("The run is input-bound")
    assert "input.prefetch_batches" in advice


def test_a_trace_without_operations():
    trace = CpuTrace()
    trace.step(3, 0, 300, 400)
    with pytest.raises(ValueError, match="no operations of devices"):
        profile_of(trace, 1)
