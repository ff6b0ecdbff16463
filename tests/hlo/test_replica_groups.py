"""Tests reading device groups in all of XLA's forms."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from google.protobuf import unknown_fields

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo.messages import HloInstructionProto
from lingvo_gshard.wings.hlo.replica_groups import (
    axes_of_groups,
    axes_of_pairs,
    replica_groups,
    source_target_pairs,
)
from tests.hlo.parsing import parse_module

MESH = Mesh.parse("data=4,model=2")


def collective(attribute: str, opcode: str = "all-gather") -> HloInstructionProto:
    """Returns a collective with this attribute, which lists its device groups."""
    dimensions = ", dimensions={0}" if opcode == "all-gather" else ""
    text = (
        "ENTRY %m (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        f"  ROOT %c = f32[8]{{0}} {opcode}(%p), {attribute}{dimensions}\n}}\n"
    )
    return parse_module(text).entry.root.proto


def groups(text: str):
    return list(replica_groups(collective(f"replica_groups={text}")))


def test_listed_replica_groups():
    assert groups("{{0,1},{2,3}}") == [(0, 1), (2, 3)]
    assert groups("{{0, 2}}") == [(0, 2)]
    assert groups("{}") == []


def test_iota_replica_groups():
    assert groups("[2,4]<=[8]") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups("[4,2]<=[2,4]T(1,0)") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups("[1,8]<=[8]") == [tuple(range(8))]


@st.composite
def transposed_iotas(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    total = math.prod(sizes)
    number = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    return sizes, order, number


@hypothesis.given(transposed_iotas())
def test_iota_matches_transposed_numpy_array(drawn):
    sizes, order, number = drawn
    total = math.prod(sizes)
    transposed = f"T({','.join(map(str, order))})" if len(sizes) > 1 else ""
    text = f"[{number},{total // number}]<=[{','.join(map(str, sizes))}]{transposed}"
    expected = np.arange(total).reshape(sizes).transpose(order).reshape(number, -1)
    assert groups(text) == [tuple(row) for row in expected.tolist()]


def test_replica_groups_by_mesh_axes():
    assert groups("mesh['a'=1,'b'=4,'c'=2] {'c'}") == groups("[4,2]<=[8]")
    assert groups("mesh['a'=4,'b'=2] {'a'}") == groups("[2,4]<=[4,2]T(1,0)")
    assert groups("mesh['a'=4,'b'=2] {'a','b'}") == [tuple(range(8))]


def test_replica_groups_by_sub_axes():
    assert groups("mesh['a'=8] {'a':(1)2}") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups("mesh['a'=8] {'a':(4)2}") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups("mesh['a'=8] {'a':(2)2}") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups("mesh['a'=4,'b'=2] {'a':(1)2,'b'}") == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_device_order_of_xlas_mesh():
    iota = "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}"
    assert groups(iota) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    listed = "mesh['a'=2,'b'=2], device_ids=(3,0,1,2) {'b'}"
    assert groups(listed) == [(3, 0), (1, 2)]


def test_unknown_replica_group_form_is_an_error():
    """A newer XLA may write them in a field that no table has."""
    proto = collective("replica_groups=[2,4]<=[8]")
    proto.ClearField("iota_collective_device_list")
    assert replica_groups(proto) == ()
    # An empty message in field 1000, which is unused.
    proto.MergeFromString(bytes([0xC2, 0x3E, 0]))
    assert 1000 in {field.field_number for field in unknown_fields.UnknownFieldSet(proto)}
    with pytest.raises(ValueError, match="c: its replica groups are in a form of a newer XLA"):
        replica_groups(proto)


@st.composite
def meshes_and_axes(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    axes = tuple((f"a{index}", size) for index, size in enumerate(sizes))
    chosen = [draw(st.booleans()) for _ in axes]
    return Mesh(axes), [name for (name, _), is_in in zip(axes, chosen, strict=True) if is_in]


@hypothesis.given(meshes_and_axes(), st.randoms())
def test_axes_are_identified_from_groups_in_any_order(drawn, random):
    """Devices whose positions differ only along the chosen axes form a group."""
    mesh, names = drawn
    kept = [index for index, name in enumerate(mesh.names) if name not in names]
    members = {}
    for device in range(mesh.size):
        position = np.unravel_index(device, mesh.shape)
        members.setdefault(tuple(position[index] for index in kept), []).append(device)
    shuffled = [tuple(random.sample(group, len(group))) for group in members.values()]
    random.shuffle(shuffled)
    wide = tuple(name for name in names if mesh.axis_size(name) > 1)
    expected = wide, math.prod(map(mesh.axis_size, wide))
    assert axes_of_groups(tuple(shuffled), mesh) == expected


def test_groups_that_follow_no_axes_have_none():
    assert axes_of_groups(((0, 3), (1, 2), (4, 7), (5, 6)), MESH) == ((), 2)
    assert axes_of_groups(((0, 1, 2, 3), (4, 5, 6, 7)), MESH) == ((), 4)
    assert axes_of_groups(((0, 1), (2, 3), (4, 5), (6, 7)), MESH) == (("model",), 2)
    assert axes_of_groups((), MESH) == (("data", "model"), 8)


def test_permute_axes_are_those_on_which_pairs_differ():
    def axes(pairs: str):
        proto = collective(f"source_target_pairs={pairs}", "collective-permute")
        return axes_of_pairs(source_target_pairs(proto), MESH)

    ring = "{" + ",".join(f"{{{i},{(i + 2) % 8}}}" for i in range(8)) + "}"
    assert axes(ring) == (("data",), 4)
    assert axes("{{0,1},{1,0}}") == (("model",), 2)
    assert axes("{{0,3}}") == (("data", "model"), 8)
    assert axes("{{0,0}}") == ((), 1)
    assert axes("{}") == ((), 1)
    assert axes("{{0,9}}") == ((), 1)
