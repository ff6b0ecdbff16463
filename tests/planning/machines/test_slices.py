# tests: wings/planning/machines/interconnect.py, wings/planning/machines/topologies.py
"""Checks the bounds on collectives across TPU slices with closed forms."""

import dataclasses

import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo.operations import Collective, Operation
from lingvo_gshard.wings.planning import operation_rows, planner, roofline
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.machines import chips, interconnect, topologies
from lingvo_gshard.wings.planning.search import search
from lingvo_gshard.wings.planning.search.experiment_search import rates_of

MIB = 2**20
# v5e: 25 Gbit/s for each chip.
RATE = 25e9 / 8


def bound(kind, axes, size, slices, mesh, name):
    call = Collective(kind, axes, size, "float32", MIB, slices=slices)
    return interconnect.seconds_bound(call, topologies.get(name), Mesh.parse(mesh))


@pytest.mark.parametrize(
    ("key", "gigabits"), [("v5e", 25), ("v5p", 50), ("v6e", 100), ("tpu7x", 100)]
)
def test_rates_between_slices_are_published_for_each_chip(key, gigabits):
    chip = chips.get(key)
    assert chip.network_bandwidth * chip.partitions * 8 == gigabits * 1e9
    assert "https://cloud.google.com/tpu/docs/" in chip.sources["network_bandwidth"]


@pytest.mark.parametrize(
    ("kind", "slices", "buffers"),
    [
        ("all-reduce", 2, 1),
        # Each of n slices sends and receives 2 (n - 1) / n of the buffer.
        ("all-reduce", 4, 1.5),
        ("all-gather", 4, 0.75),
        ("reduce-scatter", 2, 0.5),
        ("all-to-all", 4, 0.75),
        ("collective-permute", 2, 1),
    ],
)
def test_each_chip_communicates_with_its_counterparts_at_its_own_rate(kind, slices, buffers):
    mesh = f"replica={slices},data=4"
    seconds = bound(kind, ("replica",), slices, slices, mesh, f"v5e:2x2*{slices}")
    assert seconds == pytest.approx(buffers * MIB / RATE)


def test_the_two_cores_of_a_chip_share_its_rate():
    seconds = bound("all-reduce", ("data",), 2, 2, "data=2,model=8", "tpu7x:2x2x1*2")
    assert seconds == pytest.approx(MIB / (100e9 / 8 / 2))


def test_groups_of_whole_slices_use_the_rates_of_all_their_chips():
    """The compiler for CPUs leaves collectives over several slices whole."""
    mesh, name = "data=8", "v5e:2x2*2"
    assert bound("all-reduce", ("data",), 8, 2, mesh, name) == pytest.approx(MIB / (4 * RATE))
    # Half of what each device sends is for the other slice.
    assert bound("all-to-all", ("data",), 8, 2, mesh, name) == pytest.approx(MIB / 2 / RATE)


def test_a_group_is_as_slow_as_the_slower_of_both_networks():
    """A whole pod of 256 chips has 6.4 Tbit/s to another one, more than a chip has in its slice."""
    inner = bound("all-reduce", ("data",), 256, 1, "data=256", "v5e:16x16")
    assert inner > MIB / (256 * RATE)
    whole = bound("all-reduce", ("data",), 512, 2, "data=512", "v5e:16x16*2")
    assert whole == pytest.approx(inner)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all", "collective-permute"])
def test_collectives_within_slices_take_as_long_as_in_one(kind):
    alone = bound(kind, ("data",), 8, 1, "data=8,model=2", "v5e:4x4")
    assert bound(kind, ("data",), 8, 1, "data=32,model=2", "v5e:4x4*4") == pytest.approx(alone)
    mesh = "replica=4,data=8,model=2"
    assert bound(kind, ("data",), 8, 1, mesh, "v5e:4x4*4") == pytest.approx(alone)


def test_groups_that_follow_no_axes_have_a_member_in_every_slice():
    mesh = Mesh.parse("data=8")
    assert interconnect.groups(mesh, (), 2, slices=2).tolist()[:2] == [[0, 1], [2, 3]]
    across = interconnect.groups(mesh, (), 2, slices=2, spanned=2)
    assert across.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert bound("all-reduce", (), 2, 2, "data=8", "v5e:2x2*2") == pytest.approx(MIB / RATE)


def test_the_search_rates_axes_across_slices_by_their_network():
    rates = rates_of(topologies.get("v5e:2x2*2"))
    mesh = Mesh.parse("replica=2,data=4")
    across, within = (
        rates.collective_seconds("all-reduce", MIB, axes, mesh)
        for axes in (("replica",), ("data",))
    )
    assert across == pytest.approx(MIB / RATE)
    assert within < across / 4


@pytest.mark.parametrize("name", ["v5e:2x2*2", "v5e:4x4*3", "tpu7x:2x2x1*2", "v5p:4x4x4*4"])
def test_the_search_tries_meshes_that_fit_the_slices(name):
    topology = topologies.get(name)
    torus = (topology.slices, *topology.shape, topology.chip.partitions)
    found = search.mesh_shapes(topology.devices, torus)
    assert (topology.devices,) in found and len(found) > 2
    for sizes in found:
        search.unnamed_mesh(sizes).across_slices(topology.slices)


def timed(axes, size, slices, phase):
    call = Collective("all-reduce", axes, size, "float32", MIB, slices=slices)
    operation = Operation("sum", "send", "layer", phase, times=3, collective=call)
    mesh = Mesh.parse("model=2,data=4")
    return roofline.time_operations([operation], topologies.get("v5e:2x2*2"), mesh)


def test_rows_tell_collectives_across_slices_apart():
    across, within = timed(("model",), 2, 2, "backward"), timed(("data",), 4, 1, "backward")
    rows = operation_rows.collective_rows([*across, *within])
    assert {(row.kind, row.axis, row.count) for row in rows} == {
        ("all-reduce across slices", "model", 3),
        ("all-reduce", "data", 3),
    }
    # No measurement of the data-center network is published, so the estimate is the bound.
    assert across[0].seconds == pytest.approx(3 * MIB / RATE)
    assert across[0].communication_seconds == pytest.approx(3 * MIB / RATE)


def test_an_axis_that_layers_need_across_slices_is_noted():
    topology = topologies.get("v5e:2x2*2")
    (rate,) = planner.data_center_notes(timed(("model",), 2, 2, "backward"), topology)
    assert rate.startswith("2 slices, joined by the data-center network at 25 Gbit/s for each chip")
    _, note = planner.data_center_notes(timed(("model",), 2, 2, "forward"), topology)
    assert note.startswith("axis model crosses slices, and layers communicate over it")
    assert "1.01 ms a step" in note
    # Counting tokens takes a thousandth of the step.
    counted = dataclasses.replace(timed(("model",), 2, 2, "forward")[0], seconds=1e-6)
    summed = timed(("model",), 2, 2, "backward")
    assert planner.data_center_notes([counted, *summed], topology) == (rate,)
    alone = topologies.get("v5e:2x4")
    assert planner.data_center_notes(timed(("model",), 2, 2, "forward"), alone) == ()


def test_meshes_that_do_not_fit_the_slices_are_refused():
    topology = topologies.get("v5e:2x2*4")
    compilation.check_mesh(Mesh.parse("data=16"), topology)
    with pytest.raises(ValueError, match="`mesh=data=8` .*`topology=v5e:2x2.4` has 16"):
        compilation.check_mesh(Mesh.parse("data=8"), topology)
    own = dataclasses.replace(Mesh.parse("data=16"), device_order="topology")
    with pytest.raises(ValueError, match="`device_order=topology`: .* 4 slices.*contiguous"):
        compilation.check_mesh(own, topology)
    with pytest.raises(ValueError, match="`mesh=data=3,model=4`: .* over 2 slices"):
        Mesh.parse("data=3,model=4").across_slices(2)
