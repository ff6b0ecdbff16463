# tests: wings/hlo/costs.py, wings/hlo/demand.py
"""Tests bytes read and written, including fusions that read only part of an operand."""

import pytest

from lingvo_gshard.sharding.mesh import Mesh
from tests.hlo.parsing import operations_of_text

SUM = """
%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}
"""

FUSED = """
%fused (w: f32[12,8,16], i: s32[], x: f32[8,16]) -> f32[8,16] {
  %w = f32[12,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[8,16]{1,0} parameter(2)
  %zero = s32[] constant(0)
  {slice}
  %r = f32[8,16]{1,0} bitcast(%s)
  ROOT %m = f32[8,16]{1,0} multiply(%r, %x)
}

ENTRY %main (w: f32[12,8,16], i: s32[], x: f32[8,16]) -> f32[8,16] {
  %w = f32[12,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[8,16]{1,0} parameter(2)
  ROOT %f = f32[8,16]{1,0} fusion(%w, %i, %x), kind=kLoop, calls=%fused
}
"""
PART = 8 * 16 * 4


def operations(text):
    return {o.name: o for o in operations_of_text(text, Mesh.parse("data=1")).operations}


@pytest.mark.parametrize(
    "lines",
    [
        "%s = f32[1,8,16]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,8,16}",
        "%s = f32[1,8,16]{2,1,0} slice(%w), slice={[3:4], [0:8], [0:16]}",
        "%c = f32[12,8,16]{2,1,0} exponential(%w)\n"
        "  %s = f32[1,8,16]{2,1,0} dynamic-slice(%c, %i, %zero, %zero), "
        "dynamic_slice_sizes={1,8,16}",
    ],
)
def test_slicing_stacked_weights_reads_only_the_slice(lines):
    (fusion,) = operations(FUSED.replace("{slice}", lines)).values()
    is_index_read = 4 if "dynamic" in lines else 0
    assert fusion.bytes == 3 * PART + is_index_read
    assert fusion.other_flops == 8 * 16 * (2 if "exponential" in lines else 1)


def test_fully_used_operands_are_read_in_full():
    lines = (
        "%z = f32[] constant(0)\n  %a = f32[8,16]{1,0} reduce(%w, %z), dimensions={0}, "
        "to_apply=%sum\n  %s = f32[1,8,16]{2,1,0} bitcast(%a)"
    )
    (fusion,) = operations(SUM + FUSED.replace("{slice}", lines)).values()
    assert fusion.bytes == 12 * PART + 2 * PART


UPDATE = """
%fused (w: f32[12,8,16], i: s32[], x: f32[8,16]) -> (f32[12,8,16], f32[8,16]) {
  %w = f32[12,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[8,16]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %n = f32[8,16]{1,0} negate(%x)
  %u = f32[1,8,16]{2,1,0} bitcast(%n)
  %d = f32[12,8,16]{2,1,0} dynamic-update-slice(%w, %u, %i, %zero, %zero)
  ROOT %t = (f32[12,8,16]{2,1,0}, f32[8,16]{1,0}) tuple(%d, %n)
}

ENTRY %main (w: f32[12,8,16], i: s32[], x: f32[8,16]) -> f32[12,8,16] {
  %w = f32[12,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %x = f32[8,16]{1,0} parameter(2)
  %f = (f32[12,8,16]{2,1,0}, f32[8,16]{1,0}) fusion(%w, %i, %x), kind=kLoop, calls=%fused
  %f0 = f32[12,8,16]{2,1,0} get-tuple-element(%f), index=0
  %y = f32[1,8,16]{2,1,0} bitcast(%x)
  ROOT %again = f32[12,8,16]{2,1,0} dynamic-update-slice(%f0, %y, %i, %zero, %zero)
}
"""


def test_in_place_update_writes_only_the_update():
    found = operations(UPDATE)
    assert found["f"].bytes == PART + 4 + 2 * PART
    assert found["again"].bytes == 2 * PART + 2 * 4


def test_an_array_that_a_nested_fusion_only_reshapes_is_updated_in_place():
    """libtpu brings an array into another tiling so, within the fusion that updates it."""
    nested = """
%retiled (input: f32[12,8,16]) -> f32[12,8,16] {
  %input = f32[12,8,16]{2,1,0} parameter(0)
  ROOT %copy = f32[12,8,16]{2,1,0} copy(%input)
}
"""
    update = UPDATE.replace("dynamic-update-slice(%w,", "dynamic-update-slice(%r,").replace(
        "  %zero = s32[]",
        "  %r = f32[12,8,16]{2,1,0} fusion(%w), kind=kLoop, calls=%retiled\n  %zero = s32[]",
    )
    assert operations(nested + update)["f"].bytes == operations(UPDATE)["f"].bytes
    computed = nested.replace("copy(%input)", "negate(%input)")
    assert operations(computed + update)["f"].bytes > 12 * PART


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("%o = bf16[4,8]{0,1} transpose(%p), dimensions={1,0}", 2 * 64),
        ("%o = bf16[2,8,4]{2,1,0} broadcast(%p), dimensions={1,2}", 64 + 128),
        ("%o = bf16[2,4]{1,0} slice(%p), slice={[0:2], [0:4]}", 2 * 16),
        ("%o = bf16[32]{0} bitcast(%p)", None),
        ("%o = bf16[8,4]{1,0:S(1)} copy(%p)", 64),
        ("%o = (bf16[8,4]{1,0:S(1)}, bf16[8,4]{1,0}, u32[]) copy-start(%p)", 64),
        ("%o = ((bf16[8,4]{1,0}), bf16[2,4]{1,0:S(1)}, s32[]) slice-start(%p), "
         "slice={[0:2], [0:4]}", 16),
        ("%o = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%p), "
         "replica_groups={{0,1}}, dimensions={0}", 64 + 128),
        ('%o = bf16[8,4]{1,0} custom-call(), custom_call_target="AllocateBuffer"', None),
        ("%o = bf16[8,4]{1,0:T(8,128)(2,1)} copy(%p)", 64 + 8 * 128 * 2),
    ],
)  # fmt: skip
def test_bytes_of_single_instructions(line, size):
    """Arrays count with the padding of their tiles. Those in vector memory, S(1), do not count."""
    parameter = "%p = bf16[8,4]{1,0} parameter(0)"
    found = operations(f"ENTRY %main {{\n  {parameter}\n  {line}\n}}\n")
    assert (found["o"].bytes if "o" in found else None) == size


def test_arithmetic_on_scalars_is_left_out():
    text = """ENTRY %main {
  %p = s32[]{:T(256)} parameter(0)
  %q = s32[]{:T(256)S(6)} add(%p, %p)
  ROOT %o = s32[1]{0:T(256)} bitcast(%q)
}
"""
    assert operations(text) == {}
