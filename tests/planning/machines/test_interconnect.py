"""Compares bounds on collectives with closed forms and with the load of each link."""

import itertools

import numpy as np
import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo.operations import Collective
from lingvo_gshard.wings.planning.machines import interconnect, topologies

MIB = 2**20


def call(kind, axes, size, count=MIB):
    return Collective(kind, axes, size, "float32", count)


def bound_over_all(kind, topology, count=MIB):
    """Returns the bound on a collective over all devices of a topology."""
    mesh = Mesh((("all", topology.devices),))
    return interconnect.seconds_bound(call(kind, ("all",), mesh.size, count), topology, mesh)


def routed(topology, bytes_of_pair):
    """Returns the bytes on the busiest link under dimension-order routing between all chips.

    If both directions around a ring are equally long, each carries half of the bytes.
    """
    load = {}

    def walk(at, dimension, step, hops, amount):
        for _ in range(hops):
            link = (tuple(at), dimension, step)
            load[link] = load.get(link, 0.0) + amount
            at[dimension] = (at[dimension] + step) % topology.shape[dimension]

    chips = list(itertools.product(*map(range, topology.shape)))
    for source, target in itertools.permutations(chips, 2):
        at = list(source)
        for dimension, size in enumerate(topology.shape):
            forward = (target[dimension] - source[dimension]) % size
            if not topology.wraps[dimension]:
                step = 1 if target[dimension] > source[dimension] else -1
                walk(at, dimension, step, abs(target[dimension] - source[dimension]), bytes_of_pair)
            elif 2 * forward == size:
                walk(list(at), dimension, 1, forward, bytes_of_pair / 2)
                walk(at, dimension, -1, forward, bytes_of_pair / 2)
            else:
                step = 1 if 2 * forward < size else -1
                walk(at, dimension, step, min(forward, size - forward), bytes_of_pair)
            assert at[dimension] == target[dimension]
    return max(load.values())


@pytest.mark.parametrize("name", ["v5e:16x16", "v5e:4x4", "v5e:4x8", "v4:4x4x4", "v5e:8x16"])
def test_all_to_all_is_bound_by_the_busiest_link(name):
    topology = topologies.get(name)
    most = routed(topology, MIB / topology.devices)
    assert bound_over_all("all-to-all", topology) == pytest.approx(
        most / topology.chip.link_bandwidth
    )


def test_two_cores_of_a_chip_share_its_links():
    topology = topologies.get("v3:4x4")
    # Each of a chip's two cores sends to both cores of each other chip.
    most = routed(topology, 4 * MIB / topology.devices)
    assert bound_over_all("all-to-all", topology) == pytest.approx(
        most / topology.chip.link_bandwidth
    )


def test_all_to_all_on_a_2d_torus_scales_with_square_root_of_chips():
    pod = bound_over_all("all-to-all", topologies.get("v2:16x16"))
    v2 = topologies.get("v2:16x16").chip.link_bandwidth
    v3 = topologies.get("v3:32x32").chip.link_bandwidth
    assert bound_over_all("all-to-all", topologies.get("v3:32x32")) * v3 == pytest.approx(
        2 * pod * v2
    )


def test_bisection_of_a_16x16_torus_is_32_links():
    topology = topologies.get("v5e:16x16")
    # Each of 128 chips sends half of its buffer to the other half of the torus.
    expected = 128 * MIB / 2 / (32 * topology.chip.link_bandwidth)
    assert bound_over_all("all-to-all", topology) == pytest.approx(expected)


def test_ring_all_reduce_along_one_ring_of_a_torus():
    """Each device sends 2 (n - 1) / n of the buffer over two links, in both directions."""
    topology = topologies.get("v4:4x4x4")
    # Hosts have 2x2 chips, so the first axis of this mesh is the third dimension of the torus.
    mesh = Mesh((("z", 4), ("rest", 16)))
    expected = 2 * 3 / 4 * MIB / (2 * topology.chip.link_bandwidth)
    ring = call("all-reduce", ("z",), 4)
    assert interconnect.seconds_by_formula(ring, topology, mesh) == pytest.approx(expected)
    # The bound includes links along the other dimensions, which might help.
    assert interconnect.seconds_bound(ring, topology, mesh) <= expected
    for kind in ("all-gather", "reduce-scatter"):
        half = interconnect.seconds_by_formula(call(kind, ("z",), 4), topology, mesh)
        assert half == pytest.approx(expected / 2)


def test_all_reduce_over_a_full_torus_uses_all_links():
    topology = topologies.get("v5e:16x16")
    expected = 2 * 255 / 256 * MIB / (4 * topology.chip.link_bandwidth)
    assert bound_over_all("all-reduce", topology) == pytest.approx(expected)
    assert bound_over_all("all-gather", topology) == pytest.approx(expected / 2)


def test_line_without_wraparound_is_bound_by_its_end():
    topology = topologies.get("v4:2x2x2")
    mesh = Mesh((("z", 2), ("rest", 4)))
    gather = interconnect.seconds_by_formula(call("all-gather", ("z",), 2), topology, mesh)
    assert gather == pytest.approx(MIB / 2 / topology.chip.link_bandwidth)


def test_cores_of_one_chip_communicate_without_links():
    topology = topologies.get("v3:4x4")
    mesh = Mesh((("chips", 16), ("cores", 2)))
    within = interconnect.seconds_bound(call("all-reduce", ("cores",), 2), topology, mesh)
    assert within == pytest.approx(MIB / topology.chip.memory_bandwidth)
    # Both cores of each chip send a buffer.
    between = interconnect.seconds_by_formula(call("all-reduce", ("chips",), 16), topology, mesh)
    one = Mesh((("all", 32),))
    together = interconnect.seconds_by_formula(call("all-reduce", ("all",), 32), topology, one)
    assert between == pytest.approx(2 * together)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all"])
def test_single_device_groups_transfer_nothing(kind):
    topology = topologies.get("v3:4x4")
    mesh = Mesh((("data", 32), ("model", 1)))
    assert interconnect.seconds_bound(call(kind, ("model",), 1), topology, mesh) == 0
    assert interconnect.seconds_latency(call(kind, ("model",), 1), topology, mesh) == 0


def test_permute_uses_one_link():
    topology = topologies.get("v5e:4x4")
    mesh = Mesh((("all", 16),))
    seconds = interconnect.seconds_bound(call("collective-permute", ("all",), 16), topology, mesh)
    assert seconds == pytest.approx(MIB / topology.chip.link_bandwidth)


def test_gpu_collectives_within_and_across_hosts():
    topology = topologies.get("gpu:h100:4x8")
    mesh = Mesh((("hosts", 4), ("gpus", 8)))
    within = interconnect.seconds_bound(call("all-gather", ("gpus",), 8), topology, mesh)
    assert within == pytest.approx(7 / 8 * MIB / 450e9)
    # Eight groups leave each host at once, over eight adapters of 50 GB/s.
    between = interconnect.seconds_bound(call("all-gather", ("hosts",), 4), topology, mesh)
    assert between == pytest.approx(3 / 4 * MIB / 50e9)
    # Three quarters of the buffer of each GPU leave the host.
    exchange = bound_over_all("all-to-all", topology)
    assert exchange == pytest.approx(3 / 4 * MIB / 50e9)
    # Only the sum over a host's GPUs leaves the host and goes around the ring of hosts.
    assert bound_over_all("all-reduce", topology) == pytest.approx(2 * 3 / 4 * MIB / 400e9)


def test_cpu_collectives_are_bound_by_memory_bandwidth():
    topology = topologies.get("cpu:8")
    expected = 2 * MIB / topology.chip.memory_bandwidth
    assert bound_over_all("all-reduce", topology) == pytest.approx(expected)


def test_bound_of_groups_along_mesh_axes():
    mesh = Mesh((("a", 2), ("b", 3), ("c", 2)))
    np.testing.assert_array_equal(
        interconnect.groups(mesh, ("a", "c"), 4), [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    )
    np.testing.assert_array_equal(interconnect.groups(mesh, ("c",), 2)[:2], [[0, 1], [2, 3]])
    # Only the size of groups that follow no axes is known.
    assert interconnect.groups(mesh, (), 4).tolist()[1] == [4, 5, 6, 7]
    assert interconnect.groups(mesh, (), 5).shape == (12, 1)


def test_devices_along_the_last_axis_are_nearest():
    topology = topologies.get("v3:32x32")
    mesh = Mesh((("data", 256), ("model", 8)))
    near = interconnect.seconds_latency(call("all-reduce", ("model",), 8), topology, mesh)
    far = interconnect.seconds_latency(call("all-reduce", ("data",), 256), topology, mesh)
    # Eight cores of a host are on 2x2 chips. Half a ring of 32 is 16 hops, in two dimensions.
    assert near == pytest.approx(2e-6)
    assert far == pytest.approx(32e-6)


@pytest.mark.parametrize(
    ("kind", "axes", "size", "microseconds"),
    [
        # A ring: 3.6 to begin, and 2 (8 - 1) steps of 0.47 over NVLink.
        ("all-reduce", ("gpus",), 8, 10.18),
        ("all-gather", ("gpus",), 8, 6.89),
        ("all-to-all", ("gpus",), 8, 4.07),
        # A ring over four hosts: 3 steps of 2.7 over the network, twice in an all-reduce.
        ("all-gather", ("hosts",), 4, 11.7),
        ("collective-permute", ("hosts",), 4, 6.3),
        # A tree: 4.4 to begin, 7 steps of 0.52 * 1.8 and log2(4) of 5, twice.
        ("all-reduce", ("hosts", "gpus"), 32, 37.504),
    ],
)
def test_gpu_collectives_of_a_few_bytes_take_the_time_of_nccls_model(
    kind, axes, size, microseconds
):
    topology = topologies.get("gpu:h100:4x8")
    mesh = Mesh((("hosts", 4), ("gpus", 8)))
    seconds = interconnect.seconds_latency(call(kind, axes, size), topology, mesh)
    assert seconds == pytest.approx(microseconds * 1e-6)


def test_device_order_topology_lays_axes_along_rings():
    pytest.importorskip("libtpu")
    topology = topologies.get("v5e:16x16")
    axes = (("data", 16), ("model", 16))
    ring = call("all-reduce", ("model",), 16)
    laid = interconnect.seconds_by_formula(ring, topology, Mesh(axes, "topology"))
    assert laid == pytest.approx(2 * 15 / 16 * MIB / (2 * topology.chip.link_bandwidth))
