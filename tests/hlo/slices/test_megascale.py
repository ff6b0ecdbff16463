# tests: wings/hlo/tpu_slices.py, wings/hlo/operations.py
"""Checks how transfers between TPU slices are read, on HLO as libtpu writes it for slices."""

import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo import Collective, Slices, read_operations
from tests.hlo.parsing import parse_module

# Two slices of four devices, of which a program's ids are 0 to 3.
MESH = Mesh.parse("replica=2,data=2,model=2")
SPLIT = Slices(2, is_split=True)

# A sum over `replica` and `model` in a loop of five iterations: libtpu sums within each slice,
# then a part of the result across slices.
LOOP = """
add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}

body {
  state = (s32[], f32[64,128]{1,0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  value = f32[64,128]{1,0} get-tuple-element(state), index=1
  part = f32[32,128]{1,0} reduce-scatter(value),
      channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, dimensions={0},
      to_apply=add, metadata={op_name="layer/sum"}
  start = token[] after-all()
  sent = (f32[32,128]{1,0}, u32[], token[]) send(part, start),
      channel_id=2, is_host_transfer=true, frontend_attributes={ATTRIBUTES}
  received = (f32[32,128]{1,0}, u32[], token[]) recv(start),
      channel_id=3, is_host_transfer=true, frontend_attributes={ATTRIBUTES}
  sent.done = token[] send-done(sent), channel_id=2, is_host_transfer=true
  received.done = (f32[32,128]{1,0}, token[]) recv-done(received),
      channel_id=3, is_host_transfer=true
  summed = f32[32,128]{1,0} get-tuple-element(received.done), index=0
  whole = f32[64,128]{1,0} all-gather(summed),
      channel_id=4, replica_groups={{0,1},{2,3}}, dimensions={0}, use_global_device_ids=true
  ROOT result = (s32[], f32[64,128]{1,0}) tuple(next, whole)
}

condition {
  state = (s32[], f32[64,128]{1,0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  five = s32[] constant(5)
  ROOT less = pred[] compare(i, five), direction=LT
}

ENTRY main {
  value = f32[64,128]{1,0} parameter(0)
  zero = s32[] constant(0)
  state = (s32[], f32[64,128]{1,0}) tuple(zero, value)
  loop = (s32[], f32[64,128]{1,0}) while(state), condition=condition, body=body
  ROOT result = f32[64,128]{1,0} get-tuple-element(loop), index=1
}
"""

TRANSFER = """
ENTRY main {
  value = f32[4,SENT]{1,0} parameter(0)
  start = token[] after-all()
  sent = (f32[4,SENT]{1,0}, u32[], token[]) send(value, start),
      channel_id=1, is_host_transfer=true, frontend_attributes={ATTRIBUTES}
  received = (f32[4,RECEIVED]{1,0}, u32[], token[]) recv(start),
      channel_id=2, is_host_transfer=true, frontend_attributes={ATTRIBUTES}
  sent.done = token[] send-done(sent), channel_id=1, is_host_transfer=true
  received.done = (f32[4,RECEIVED]{1,0}, token[]) recv-done(received),
      channel_id=2, is_host_transfer=true
  ROOT result = f32[4,RECEIVED]{1,0} get-tuple-element(received.done), index=0
}
"""

COUNTERPARTS = "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}"


def with_attributes(text, kind, target):
    attributes = {
        "_xla_host_transfer_handler_name": "xla_megascale_runtime",
        "_xla_host_transfer_rendezvous": "rendezvous_0",
        "_xla_megascale_target": target,
        "_xla_megascale_transfer_type": kind,
    }
    return text.replace("ATTRIBUTES", ",".join(f'{k}="{v}"' for k, v in attributes.items()))


def operations(text, mesh=MESH, slices=SPLIT):
    return read_operations(parse_module(text), mesh, slices=slices).operations


def transferred(kind, target, sent=8, received=8, mesh=MESH, slices=SPLIT):
    """Returns the only operation of a program that transfers float32[4, size]."""
    text = with_attributes(TRANSFER, kind, target)
    text = text.replace("SENT", str(sent)).replace("RECEIVED", str(received))
    (found,) = operations(text, mesh, slices)
    return found


def test_a_sum_in_a_loop_is_read_as_collectives_within_and_across_slices():
    found = operations(with_attributes(LOOP, "ALL_REDUCE", COUNTERPARTS))
    part = 32 * 128 * 4
    assert [(o.times, o.collective) for o in found if o.collective] == [
        (5, Collective("reduce-scatter", ("model",), 2, "float32", 2 * part)),
        (5, Collective("all-reduce", ("replica",), 2, "float32", part, slices=2)),
        (5, Collective("all-gather", ("model",), 2, "float32", 2 * part)),
    ]
    (send,) = [o for o in found if o.opcode == "send"]
    assert (send.bytes, send.op_name) == (2 * part, "layer/sum")
    assert not [o for o in found if o.opcode == "recv"]


@pytest.mark.parametrize("target", [COUNTERPARTS, "{1,2}x{0:3}"])
@pytest.mark.parametrize(
    ("type_", "kind", "sent", "received"),
    [
        ("ALL_REDUCE", "all-reduce", 8, 8),
        ("ALL_GATHER", "all-gather", 8, 16),
        ("REDUCE_SCATTER", "reduce-scatter", 16, 8),
        ("ALL_TO_ALL", "all-to-all", 8, 8),
    ],
)
def test_the_type_of_a_transfer_is_a_kind_of_collective(target, type_, kind, sent, received):
    found = transferred(type_, target, sent, received)
    larger = 4 * 4 * max(sent, received)
    assert found.collective == Collective(kind, ("replica",), 2, "float32", larger, slices=2)
    assert found.bytes == 4 * 4 * (sent + received)


def test_an_exchange_may_join_several_devices_of_each_slice():
    target = "{{100000,100001,200000,200001},{100002,100003,200002,200003}}"
    found = transferred("ALL_TO_ALL", target).collective
    assert (found.axes, found.group_size, found.slices) == (("replica", "model"), 4, 2)


def test_pairs_follow_the_axes_along_which_they_send():
    pairs = ",".join(f"{{10000{i}->20000{i}}},{{20000{i}->10000{i}}}" for i in range(4))
    found = transferred("ONE_TO_ONE", f"{{{pairs}}}").collective
    assert found == Collective(
        "collective-permute", ("replica",), 2, "float32", 4 * 4 * 8, slices=2
    )


def test_some_axes_of_several_slices_are_named():
    mesh = Mesh.parse("a=2,b=2,c=2")
    slices = Slices(4, is_split=True)
    targets = {
        ("a",): "{{100000,300000},{100001,300001},{200000,400000},{200001,400001}}",
        ("b",): "{{100000,200000},{100001,200001},{300000,400000},{300001,400001}}",
        ("a", "b"): "{1,2,3,4}x{0:1}",
        (): "{{100000,400000},{100001,400001},{200000,300000},{200001,300001}}",
    }
    for axes, target in targets.items():
        found = transferred("ALL_REDUCE", target, mesh=mesh, slices=slices).collective
        size = 4 if len(axes) == 2 else 2
        assert (found.axes, found.group_size, found.slices) == (axes, size, size)


def test_a_target_of_unknown_form_joins_all_slices():
    found = transferred("SOME_TO_SOME", "everyone").collective
    assert (found.kind, found.axes, found.slices) == (
        "some-to-some",
        ("replica", "data", "model"),
        2,
    )


REDUCE = """
add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}

ENTRY main {
  value = f32[64]{0} parameter(0)
  ROOT summed = f32[64]{0} all-reduce(value),
      channel_id=1, replica_groups=GROUPS, use_global_device_ids=true, to_apply=add
}
"""


@pytest.mark.parametrize(
    ("groups", "is_split", "axes", "size", "spanned"),
    [
        # A program of one slice names that slice's devices only.
        ("{{0,1,2,3}}", True, ("data",), 4, 1),
        ("{{0,2},{1,3}}", True, (), 2, 1),
        # The compiler for CPUs has one program for all devices.
        ("{{0,1,2,3},{4,5,6,7}}", False, ("data",), 4, 1),
        ("{{0,1,2,3,4,5,6,7}}", False, ("data",), 8, 2),
        ("{{0,4},{1,5},{2,6},{3,7}}", False, ("data",), 2, 2),
    ],
)
def test_an_axis_may_extend_within_slices_and_across_them(groups, is_split, axes, size, spanned):
    text = REDUCE.replace("GROUPS", groups)
    (found,) = operations(text, Mesh.parse("data=8"), Slices(2, is_split))
    expected = Collective("all-reduce", axes, size, "float32", 256, slices=spanned)
    assert found.collective == expected


def test_pairs_within_a_slice_join_its_part_of_an_axis():
    text = """
ENTRY main {
  value = f32[64]{0} parameter(0)
  ROOT sent = f32[64]{0} collective-permute(value),
      channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}
}
"""
    (found,) = operations(text, Mesh.parse("data=8"), SPLIT)
    assert found.collective == Collective("collective-permute", ("data",), 4, "float32", 256)
