"""Compares times of operations and steps, and budgets, with figures computed by hand."""

import dataclasses

import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo.operations import Collective, Operation
from lingvo_gshard.wings.planning import roofline
from lingvo_gshard.wings.planning.machines import efficiencies, interconnect, topologies

TOPOLOGY = topologies.get("v3:4x4")
MESH = Mesh((("data", 32),))
CALL = Collective("all-to-all", ("data",), 32, "float32", 8 * 2**20)
MATMUL = Operation("m", "fusion", "layer", "forward", 3, 10**12, 10**6, "float32", bytes=10**6)
COPY = Operation("c", "copy", "layer", "forward", 2, bytes=45 * 10**7)
EXCHANGE = Operation(
    "x", "all-to-all", "layer", "forward", 4, bytes=2 * CALL.bytes, collective=CALL
)


def timed(*operations):
    return roofline.time_operations(operations, TOPOLOGY, MESH)


def test_matmul_time_is_flops_over_peak_rate():
    (found,) = timed(MATMUL)
    assert found.compute_seconds == pytest.approx(3 * 1e12 / 61.5e12)
    assert found.memory_seconds == pytest.approx(3 * 1e6 / 450e9)
    assert found.communication_seconds == 0
    assert found.seconds_bound == found.compute_seconds
    assert found.seconds == pytest.approx(found.compute_seconds / 0.85)
    assert found.operation is MATMUL


def test_more_passes_take_longer():
    (once,) = timed(MATMUL)
    (six,) = timed(dataclasses.replace(MATMUL, passes=6))
    assert six.seconds_bound == pytest.approx(6 * once.seconds_bound)


def test_elementwise_operations_are_bound_by_memory_or_by_the_vector_unit():
    (copy,) = timed(COPY)
    assert copy.seconds_bound == copy.memory_seconds == pytest.approx(2e-3)
    assert copy.seconds > copy.seconds_bound
    many = Operation("e", "fusion", "", "other", other_flops=10**12, bytes=10**6)
    (found,) = timed(many)
    assert found.seconds_bound == pytest.approx(1e12 / TOPOLOGY.chip.vector_flops)


def test_collective_time_is_bound_by_links():
    (found,) = timed(EXCHANGE)
    bound = interconnect.seconds_bound(CALL, TOPOLOGY, MESH)
    assert found.communication_seconds == pytest.approx(4 * bound)
    assert found.seconds_bound == found.communication_seconds
    # The time of the paper's microbenchmark of this collective plus six hops.
    assert found.seconds == pytest.approx(4 * (296e-6 + 6e-6))


def test_every_estimate_is_above_its_bound():
    for name in ("v3:4x4", "tpu7x:2x4x2", "gpu:h100:4x8", "cpu:32"):
        topology = topologies.get(name)
        for found in roofline.time_operations([MATMUL, COPY, EXCHANGE], topology, MESH):
            assert found.seconds >= found.seconds_bound * (1 - 1e-9)


def test_step_bound_overlaps_communication_and_estimate_does_not():
    operations = timed(MATMUL, COPY, EXCHANGE)
    matmul, copy, exchange = operations
    step = roofline.step_time(operations)
    assert step.seconds_bound == pytest.approx(matmul.seconds_bound + copy.seconds_bound)
    assert step.seconds == pytest.approx(matmul.seconds + copy.seconds + exchange.seconds)
    alone = roofline.step_time([exchange])
    assert alone.seconds_bound == exchange.communication_seconds
    assert roofline.step_time([]).seconds == 0


def test_mesh_of_wrong_size_is_rejected():
    with pytest.raises(ValueError, match="`mesh=data=16` needs 16 devices"):
        roofline.time_operations([MATMUL], TOPOLOGY, Mesh((("data", 16),)))


def test_training_budget():
    found = roofline.budget(1e12, 1e-6, topologies.get("v3:32x32"))
    assert found.chip_hours == pytest.approx(1e6 / 3600 * 1024)
    assert found.kilowatt_hours == pytest.approx(found.chip_hours * 0.22)
    assert found.price == pytest.approx(found.chip_hours * 2)
    assert found.currency == "USD"
    assert all("http" in source for source in found.sources)
    unpriced = roofline.budget(1e12, 1e-6, topologies.get("tpu7x:2x2x1"))
    assert unpriced.sources == ()
    assert unpriced.price is unpriced.kilowatt_hours is unpriced.currency is None


def test_utilization_is_of_the_bfloat16_peak():
    assert roofline.utilization(61.5e12, 2.0, TOPOLOGY) == pytest.approx(0.5)
    core = topologies.get("cpu:2")
    assert roofline.utilization(core.chip.peak("float32"), 1.0, core) == 1


def test_sources_name_the_paper():
    found = efficiencies.collective_efficiency("all-reduce", 2**23, 64, TOPOLOGY.chip)
    assert "2006.16668" in found.source
