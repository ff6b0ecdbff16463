"""Groups of devices in all forms that HLO has, against NumPy and the mesh's own positions."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from lingvo_gshard.hlo.replica_groups import axes_of_groups, axes_of_pairs, parse_groups
from lingvo_gshard.sharding.mesh import Mesh

MESH = Mesh.parse("data=4,model=2")


def test_lists():
    assert parse_groups("{{0,1},{2,3}}", 4) == [(0, 1), (2, 3)]
    assert parse_groups("{{0, 2}}", 4) == [(0, 2)]
    assert parse_groups("{}", 3) == [(0, 1, 2)]
    with pytest.raises(ValueError, match="no replica groups"):
        parse_groups("what", 4)


def test_iotas():
    assert parse_groups("[2,4]<=[8]", 8) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert parse_groups("[4,2]<=[2,4]T(1,0)", 8) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert parse_groups("[1,8]<=[8]", 8) == [tuple(range(8))]


@st.composite
def transposed_iotas(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    total = math.prod(sizes)
    groups = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    return sizes, order, groups


@hypothesis.given(transposed_iotas())
def test_an_iota_is_an_array_of_numpy_transposed_and_reshaped(drawn):
    sizes, order, groups = drawn
    total = math.prod(sizes)
    text = (
        f"[{groups},{total // groups}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    )
    expected = np.arange(total).reshape(sizes).transpose(order).reshape(groups, -1)
    assert parse_groups(text, total) == [tuple(row) for row in expected.tolist()]


def test_axes_of_a_mesh_of_xlas_own():
    assert parse_groups("mesh['a'=1,'b'=4,'c'=2] {'c'}", 8) == parse_groups("[4,2]<=[8]", 8)
    assert parse_groups("mesh['a'=4,'b'=2] {'a'}", 8) == parse_groups("[2,4]<=[4,2]T(1,0)", 8)
    assert parse_groups("mesh['a'=4,'b'=2] {'a','b'}", 8) == [tuple(range(8))]
    assert parse_groups("@mesh<a=4,b=2> {b}", 8) == parse_groups("[4,2]<=[8]", 8)


def test_parts_of_axes_are_their_major_middle_or_minor_positions():
    assert parse_groups("mesh['a'=8] {'a':(1)2}", 8) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert parse_groups("mesh['a'=8] {'a':(4)2}", 8) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert parse_groups("mesh['a'=8] {'a':(2)2}", 8) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    found = parse_groups("mesh['a'=4,'b'=2] {'a':(1)2,'b'}", 8)
    assert found == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_the_devices_of_a_mesh_may_be_in_another_order():
    iota = "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}"
    assert parse_groups(iota, 8) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    listed = "mesh['a'=2,'b'=2], device_ids=(3,0,1,2) {'b'}"
    assert parse_groups(listed, 4) == [(3, 0), (1, 2)]


@st.composite
def meshes_and_axes(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    axes = tuple((f"a{index}", size) for index, size in enumerate(sizes))
    chosen = [draw(st.booleans()) for _ in axes]
    return Mesh(axes), [name for (name, _), is_in in zip(axes, chosen, strict=True) if is_in]


@hypothesis.given(meshes_and_axes(), st.randoms())
def test_axes_are_found_by_their_groups_in_whatever_order(drawn, random):
    """Devices that differ in the chosen axes alone are in one group."""
    mesh, names = drawn
    kept = [index for index, name in enumerate(mesh.names) if name not in names]
    groups = {}
    for device in range(mesh.size):
        position = np.unravel_index(device, mesh.shape)
        groups.setdefault(tuple(position[index] for index in kept), []).append(device)
    shuffled = [random.sample(group, len(group)) for group in groups.values()]
    random.shuffle(shuffled)
    text = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in shuffled) + "}"
    wide = tuple(name for name in names if mesh.axis_size(name) > 1)
    assert axes_of_groups(text, mesh) == (wide, math.prod(map(mesh.axis_size, wide)))


def test_other_groups_are_of_no_axes():
    assert axes_of_groups("{{0,3},{1,2},{4,7},{5,6}}", MESH) == ((), 2)
    assert axes_of_groups("{{0,1,2,3},{4,5,6,7}}", MESH) == ((), 4)
    assert axes_of_groups("[4,2]<=[8]", MESH) == (("model",), 2)
    assert axes_of_groups("{}", MESH) == (("data", "model"), 8)


def test_pairs_go_along_the_axes_in_which_they_differ():
    ring = "{" + ",".join(f"{{{i},{(i + 2) % 8}}}" for i in range(8)) + "}"
    assert axes_of_pairs(ring, MESH) == (("data",), 4)
    assert axes_of_pairs("{{0,1},{1,0}}", MESH) == (("model",), 2)
    assert axes_of_pairs("{{0,3}}", MESH) == (("data", "model"), 8)
    assert axes_of_pairs("{{0,0}}", MESH) == ((), 1)
    assert axes_of_pairs("{}", MESH) == ((), 1)
    assert axes_of_pairs("{{0,9}}", MESH) == ((), 1)
