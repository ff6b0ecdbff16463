# tests: wings/hlo/asynchronous.py, wings/hlo/demand.py, wings/hlo/tpu_slices.py
"""Checks which collectives are under way while an operation runs, on scheduled HLO."""

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo import Slices, read_operations
from lingvo_gshard.wings.hlo.tpu_slices import ONE_SLICE
from tests.hlo.parsing import parse_module
from tests.hlo.slices.test_megascale import LOOP, MESH

DATA = Mesh.parse("data=2,model=2")
GROUPS = "replica_groups={{0,2},{1,3}}, channel_id=1"
SCHEDULED = "HloModule test, is_scheduled=true\n\n"
SUM = """add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}

"""
# A gather in an iteration, and a sum around the loop.
IN_LOOP = f"""{SUM}body {{
  state = (s32[], f32[8,8]{{1,0}}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  x = f32[8,8]{{1,0}} get-tuple-element(state), index=1
  before = f32[8,8]{{1,0}} negate(x)
  gather = (f32[8,8]{{1,0}}, f32[16,8]{{1,0}}) all-gather-start(before), dimensions={{0}}, {GROUPS}
  inside = f32[8,8]{{1,0}} exponential(x)
  gathered = f32[16,8]{{1,0}} all-gather-done(gather)
  after = f32[8,8]{{1,0}} add(inside, before)
  ROOT result = (s32[], f32[8,8]{{1,0}}) tuple(next, after)
}}

condition {{
  state = (s32[], f32[8,8]{{1,0}}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  five = s32[] constant(5)
  ROOT less = pred[] compare(i, five), direction=LT
}}

ENTRY main {{
  p = f32[8,8]{{1,0}} parameter(0)
  q = f32[8,8]{{1,0}} parameter(1)
  zero = s32[] constant(0)
  state = (s32[], f32[8,8]{{1,0}}) tuple(zero, p)
  sum = f32[8,8]{{1,0}} all-reduce-start(q), to_apply=add, {GROUPS}
  loop = (s32[], f32[8,8]{{1,0}}) while(state), condition=condition, body=body
  summed = f32[8,8]{{1,0}} all-reduce-done(sum)
  ROOT last = f32[8,8]{{1,0}} sine(summed)
}}
"""


def in_flight(text, mesh=DATA, slices=ONE_SLICE):
    """Returns the collectives under way during each operation, by its name."""
    found = read_operations(parse_module(text), mesh, slices=slices).operations
    return {each.name: each.in_flight for each in found}


def test_a_collective_is_under_way_between_its_start_and_its_end():
    found = in_flight(SCHEDULED + IN_LOOP)
    assert found == {
        "sum": (),
        "before": ("sum",),
        "gather": ("sum",),
        "inside": ("sum", "gather"),
        "after": ("sum",),
        "last": (),
    }


def test_nothing_is_under_way_without_a_schedule():
    assert set(in_flight(IN_LOOP).values()) == {()}


def test_an_asynchronous_computation_with_an_update_ends_with_its_done():
    text = f"""{SCHEDULED}wrapped {{
  a = f32[8]{{0}} parameter(0)
  ROOT t = f32[8]{{0}} all-to-all(a), dimensions={{0}}, {GROUPS}
}}

ENTRY main {{
  p = f32[8]{{0}} parameter(0)
  s = ((f32[8]{{0}}), f32[8]{{0}}, s32[]) async-start(p), calls=wrapped
  first = f32[8]{{0}} negate(p)
  u = ((f32[8]{{0}}), f32[8]{{0}}, s32[]) async-update(s)
  second = f32[8]{{0}} negate(first)
  d = f32[8]{{0}} async-done(u)
  ROOT third = f32[8]{{0}} add(second, d)
}}
"""
    expected = {"s": (), "first": ("s",), "second": ("s",), "third": ()}
    assert in_flight(text) == expected


def test_a_transfer_between_slices_ends_when_it_is_received():
    text = LOOP.replace(
        "  received.done =",
        "  beside = f32[64,128]{1,0} negate(value)\n  received.done =",
    )
    attributes = (
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_host_transfer_rendezvous="r",_xla_megascale_target="{100000,200000}x{0:3}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"'
    )
    text = SCHEDULED + text.replace("ATTRIBUTES", attributes)
    found = in_flight(text, MESH, Slices(2, is_split=True))
    assert found == {"part": (), "sent": (), "beside": ("sent",), "whole": ()}


def test_only_fusions_that_carry_a_collective_run_while_it_moves():
    """TPUs move data step by step, in fusions that also compute a product."""
    config = 'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
    gather = f"f32[8,8]{{1,0}} all-gather(a), {GROUPS}, dimensions={{0}}, {config}"
    text = f"""{SCHEDULED}start {{
  a = f32[4,8]{{1,0}} parameter(0)
  g = {gather}
  ROOT c = (f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) custom-call(g),
      custom_call_target="AsyncCollectiveStart"
}}

middle {{
  a = f32[4,8]{{1,0}} parameter(0)
  b = f32[8,8]{{1,0}} parameter(1)
  g = {gather}
  d = f32[8,8]{{1,0}} dot(b, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT t = (f32[8,8]{{1,0}}, f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) tuple(d, a, g)
}}

end {{
  a = f32[4,8]{{1,0}} parameter(0)
  b = f32[8,8]{{1,0}} parameter(1)
  g = {gather}
  ROOT c = f32[8,8]{{1,0}} custom-call(a, b, g), custom_call_target="AsyncCollectiveDone"
}}

ENTRY main {{
  p = f32[4,8]{{1,0}} parameter(0)
  q = f32[8,8]{{1,0}} parameter(1)
  s = (f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) fusion(p), kind=kCustom, calls=start
  s0 = f32[4,8]{{1,0}} get-tuple-element(s), index=0
  alone = f32[8,8]{{1,0}} negate(q)
  m = (f32[8,8]{{1,0}}, f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) fusion(s0, alone), kind=kOutput,
      calls=middle
  m0 = f32[8,8]{{1,0}} get-tuple-element(m), index=0
  m1 = f32[4,8]{{1,0}} get-tuple-element(m), index=1
  n = (f32[8,8]{{1,0}}, f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) fusion(m1, m0), kind=kOutput,
      calls=middle.1
  n2 = f32[8,8]{{1,0}} get-tuple-element(n), index=2
  ROOT e = f32[8,8]{{1,0}} fusion(s0, n2), kind=kCustom, calls=end
}}
"""
    middle = text[text.index("middle {") : text.index("end {")]
    text = text.replace("end {", f"{middle.replace('middle', 'middle.1')}end {{", 1)
    found = in_flight(text)
    assert {name: found[name] for name in ("s", "alone", "m", "n")} == {
        "s": (),
        "alone": (),
        "m": ("s",),
        "n": ("s",),
    }
