# tests: wings/hlo/collectives.py, wings/hlo/demand.py
"""Tests reading collectives in all forms that compilers write."""

import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo.operations import Collective
from tests.hlo.parsing import operations_of_text

MESH = Mesh.parse("data=4,model=2")
MODEL = "replica_groups=[4,2]<=[8]"
DATA = "replica_groups=[2,4]<=[4,2]T(1,0)"

SUM = """%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

"""


def calls(body, computations=""):
    """Returns the collectives of a program whose entry computation has this body."""
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    found = operations_of_text(f"{SUM}{computations}ENTRY %main {{\n{lines}}}\n", MESH)
    return [o.collective for o in found.operations if o.collective]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            f"all-reduce(%p), {MODEL}, to_apply=%sum",
            Collective("all-reduce", ("model",), 2, "float32", 256),
        ),
        (
            f"all-to-all(%p), channel_id=1, {DATA}, dimensions={{0}}",
            Collective("all-to-all", ("data",), 4, "float32", 256),
        ),
        (
            "collective-broadcast(%p), replica_groups={{0,1,2,3,4,5,6,7}}",
            Collective("collective-broadcast", ("data", "model"), 8, "float32", 256),
        ),
        (
            "collective-permute(%p), source_target_pairs={{0,2},{2,4},{4,6},{6,0}}",
            Collective("collective-permute", ("data",), 4, "float32", 256),
        ),
        (
            "all-reduce(%p), replica_groups=mesh['a'=4,'b'=2], device_ids=([8]) {'b'}, "
            "to_apply=%sum",
            Collective("all-reduce", ("model",), 2, "float32", 256),
        ),
    ],
)
def test_collective_of_one_array(line, expected):
    body = f"%p = f32[8,8]{{1,0}} parameter(0)\nROOT %c = f32[8,8]{{1,0}} {line}"
    assert calls(body) == [expected]


def test_bytes_count_the_larger_of_operand_and_result():
    gather = f"""%p = bf16[2,8]{{1,0}} parameter(0)
        ROOT %g = bf16[8,8]{{1,0}} all-gather(%p), {DATA}, dimensions={{0}}"""
    scatter = f"""%p = bf16[8,8]{{1,0}} parameter(0)
        ROOT %s = bf16[2,8]{{1,0}} reduce-scatter(%p), {DATA}, dimensions={{0}}, to_apply=%sum"""
    assert calls(gather) == [Collective("all-gather", ("data",), 4, "bfloat16", 128)]
    assert calls(scatter) == [Collective("reduce-scatter", ("data",), 4, "bfloat16", 128)]


def test_bytes_of_combined_arrays_are_summed():
    body = f"""%p = f32[8]{{0}} parameter(0)
        %q = bf16[64]{{0}} parameter(1)
        ROOT %c = (f32[8]{{0}}, /*index=1*/bf16[64]{{0}}) all-reduce(%p, %q), {MODEL}, to_apply=%sum
    """
    assert calls(body) == [Collective("all-reduce", ("model",), 2, "bfloat16", 32 + 128)]


@pytest.mark.parametrize(
    ("start", "kind", "size"),
    [
        (f"f32[8]{{0}} all-reduce-start(%p), {MODEL}, to_apply=%sum", "all-reduce", 32),
        (
            f"(f32[8]{{0}}, f32[16]{{0}}) all-gather-start(%p), {MODEL}, dimensions={{0}}",
            "all-gather",
            64,
        ),
        (
            "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            32,
        ),
        (
            f"((f32[8]{{0}}), f32[4]{{0}}, s32[]) reduce-scatter-start(%p), {MODEL}, "
            "dimensions={0}, to_apply=%sum",
            "reduce-scatter",
            32,
        ),
        ("((f32[8]{0}), f32[8]{0}, s32[]) async-start(%p), calls=%wrapped", "all-to-all", 32),
    ],
)
def test_asynchronous_collectives_count_once(start, kind, size):
    wrapped = f"""%wrapped (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  ROOT %t = f32[8]{{0}} all-to-all(%a), {MODEL}, dimensions={{0}}
}}

"""
    done = "async" if "async" in start else kind
    body = f"""%p = f32[8]{{0}} parameter(0)
        %s = {start}
        ROOT %d = f32[8]{{0}} {done}-done(%s)"""
    assert calls(body, wrapped) == [Collective(kind, ("model",), 2, "float32", size)]


def test_an_all_reduce_followed_by_a_slice_is_a_reduce_scatter():
    fused = f"""%all-reduce-scatter (a: f32[8,4], b: f32[2]) -> (f32[4,4], f32[1]) {{
  %a = f32[8,4]{{1,0}} parameter(0)
  %b = f32[2]{{0}} parameter(1)
  %r = (f32[8,4]{{1,0}}, f32[2]{{0}}) all-reduce(%a, %b), {MODEL}, to_apply=%sum
  %r0 = f32[8,4]{{1,0}} get-tuple-element(%r), index=0
  %r1 = f32[2]{{0}} get-tuple-element(%r), index=1
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  %d0 = f32[4,4]{{1,0}} dynamic-slice(%r0, %id, %zero), dynamic_slice_sizes={{4,4}}
  %d1 = f32[1]{{0}} dynamic-slice(%r1, %id), dynamic_slice_sizes={{1}}
  ROOT %t = (f32[4,4]{{1,0}}, f32[1]{{0}}) tuple(%d0, %d1)
}}

"""
    body = """%p = f32[8,4]{1,0} parameter(0)
        %q = f32[2]{0} parameter(1)
        ROOT %f = (f32[4,4]{1,0}, f32[1]{0}) fusion(%p, %q), kind=kCustom, calls=%all-reduce-scatter
    """
    (call,) = calls(body, fused)
    assert call == Collective("reduce-scatter", ("model",), 2, "float32", 8 * 4 * 4 + 8)


def test_a_collective_that_spans_fusions_counts_where_it_starts():
    """TPU compilers write an all-gather that overlaps a matrix product like this."""
    config = 'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
    gather = f"f32[8,8]{{1,0}} all-gather(%a), {MODEL}, dimensions={{0}}, {config}"
    fused = f"""%start (a: f32[4,8]) -> (f32[4,8], f32[8,8]) {{
  %a = f32[4,8]{{1,0}} parameter(0)
  %g = {gather}
  ROOT %c = (f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}}

%middle (a: f32[4,8], b: f32[8,8]) -> (f32[8,8], f32[4,8], f32[8,8]) {{
  %a = f32[4,8]{{1,0}} parameter(0)
  %b = f32[8,8]{{1,0}} parameter(1)
  %g = {gather}
  %d = f32[8,8]{{1,0}} dot(%b, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (f32[8,8]{{1,0}}, f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) tuple(%d, %a, %g)
}}

%done (a: f32[4,8], b: f32[8,8]) -> f32[8,8] {{
  %a = f32[4,8]{{1,0}} parameter(0)
  %b = f32[8,8]{{1,0}} parameter(1)
  %g = {gather}
  ROOT %c = f32[8,8]{{1,0}} custom-call(%a, %b, %g), custom_call_target="AsyncCollectiveDone"
}}

"""
    text = f"""{SUM}{fused}ENTRY %main (p: f32[4,8], q: f32[8,8]) -> f32[8,8] {{
  %p = f32[4,8]{{1,0}} parameter(0)
  %q = f32[8,8]{{1,0}} parameter(1)
  %s = (f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) fusion(%p), kind=kCustom, calls=%start
  %s0 = f32[4,8]{{1,0}} get-tuple-element(%s), index=0
  %m = (f32[8,8]{{1,0}}, f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) fusion(%s0, %q), kind=kOutput, \
calls=%middle
  %m0 = f32[8,8]{{1,0}} get-tuple-element(%m), index=0
  %m2 = f32[8,8]{{1,0}} get-tuple-element(%m), index=2
  ROOT %e = f32[8,8]{{1,0}} fusion(%s0, %m2), kind=kCustom, calls=%done
}}
"""
    found = {o.name: o for o in operations_of_text(text, MESH).operations}
    expected = Collective("all-gather", ("model",), 2, "float32", 256)
    assert [o.collective for o in found.values()] == [expected, None, None]
    assert found["m"].matmul_flops == 2 * 8**3
    # The matmul reads one operand and writes its result. Pass-through values cost nothing.
    assert found["m"].bytes == 2 * 256
    assert found["e"].bytes == 0


def test_each_collective_of_a_fusion_is_an_operation():
    fused = f"""%two (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  %r = f32[8]{{0}} all-reduce(%a), {MODEL}, to_apply=%sum
  ROOT %s = f32[8]{{0}} all-reduce(%r), {DATA}, to_apply=%sum
}}

"""
    body = """%p = f32[8]{0} parameter(0)
        ROOT %f = f32[8]{0} fusion(%p), kind=kCustom, calls=%two"""
    assert [call.axes for call in calls(body, fused)] == [("model",), ("data",)]
