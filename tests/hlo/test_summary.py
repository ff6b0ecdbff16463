"""What is read from XLA's text: lines as XLA wrote them for CPU, GPU and TPU."""

import pytest

from lingvo_gshard.hlo import summary

NAMED = (
    'metadata={op_name="jit(call)/call_exported[name=f]/layers_0/feed_forward/einsum/Einsum" '
    'source_file="a.py" source_line=1}'
)

# The line, the kind, and the bytes of what one device has afterwards.
LINES = [
    (
        f"  %all-reduce.7 = f32[2,16]{{1,0}} all-reduce(%dot), replica_groups={{{{0,1}}}}, {NAMED}",
        "all-reduce",
        2 * 16 * 4,
    ),
    (
        "  ROOT %all-reduce = (f32[], bf16[3,5]{1,0}) all-reduce(%a, %b), to_apply=%add",
        "all-reduce",
        4 + 3 * 5 * 2,
    ),
    (
        "  %all-to-all.2 = (s8[1,4]{1,0}, s8[1,4]{1,0}, /*index=2*/s8[1,4]{1,0}) "
        "all-to-all(%x, %y, %z), channel_id=3",
        "all-to-all",
        3 * 4,
    ),
    (
        "  all-gather.1 = pred[8]{0:T(256)} all-gather(param.1), dimensions={0}",
        "all-gather",
        8,
    ),
    (
        "  %all-gather-start.3 = (bf16[4,128]{1,0:T(8,128)(2,1)}, bf16[32,128]{1,0:T(8,128)(2,1)}) "
        "all-gather-start(%fusion.2), channel_id=1",
        "all-gather",
        32 * 128 * 2,
    ),
    (
        "  %all-gather-start = ((f32[1]{0}, f32[2]{0}), (f32[8]{0}, f32[16]{0})) "
        "all-gather-start(%a, %b)",
        "all-gather",
        (8 + 16) * 4,
    ),
    (
        "  %all-reduce-start = (f32[4]{0}, f32[2]{0}) all-reduce-start(%a, %b), to_apply=%add",
        "all-reduce",
        (4 + 2) * 4,
    ),
    (
        "  %collective-permute-start = (f32[4,2]{1,0}, f32[4,2]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%p), source_target_pairs={{0,1}}",
        "collective-permute",
        4 * 2 * 4,
    ),
    (
        "  %reduce-scatter.5 = f8e4m3fn[64]{0} reduce-scatter(%x), dimensions={0}, to_apply=%add",
        "reduce-scatter",
        64,
    ),
    ("  %r = (s4[5]{0}, token[]) all-reduce(%x, %t), to_apply=%add", "all-reduce", 3),
    ("  %c = c64[2]{0} collective-broadcast(%x)", "collective-broadcast", 16),
    ("  %g = f64[2]{0} ragged-all-to-all(%x, %y)", "ragged-all-to-all", 16),
]

OTHERS = """
  %all-gather-done.3 = bf16[32,128]{1,0} all-gather-done(%all-gather-start.3)
  %get-tuple-element = f32[4]{0} get-tuple-element(%all-to-all.2), index=0
  %fusion = f32[4]{0} fusion(%all-reduce.7), kind=kLoop, calls=%all-reduce-fusion
  %all-reduce-scatter-fusion (p: f32[4]) -> f32[4] {
"""


@pytest.mark.parametrize(("line", "kind", "size"), LINES)
def test_a_collective_and_its_bytes(line, kind, size):
    (found,) = summary.collectives(line)
    assert (found.kind, found.bytes) == (kind, size)


def test_in_their_order_and_nothing_else():
    text = OTHERS.join(line for line, _, _ in LINES) + OTHERS
    found = summary.collectives(text)
    assert [c.kind for c in found] == [kind for _, kind, _ in LINES]
    assert summary.count_by_kind(found)["all-reduce"] == 4
    assert summary.count_by_kind([]) == {}


def test_the_name_is_that_of_the_layers_and_operation():
    assert summary.collectives(LINES[0][0])[0].operation == "layers_0/feed_forward/einsum/Einsum"
    assert summary.collectives(LINES[1][0])[0].operation == ""
    name = 'op_name="jit(step)/jit(main)/call_exported/a/b"'
    assert summary.operation_name(name) == "a/b"
    assert summary.operation_name('op_name="a/jit(b)/c"') == "a/jit(b)/c"


WARNING = (
    "W1121 15:50:55.909580   12241 spmd_partitioner.cc:656] [SPMD] Involuntary full "
    "rematerialization. The compiler cannot go from sharding {devices=[1,2]0,1} to "
    "{devices=[2,1]0,1} efficiently for HLO operation %copy.1 = f32[8,4]{1,0} copy(%Sin.0), "
    "sharding={devices=[1,2]0,1}%s. As the last resort, SPMD will replicate the tensor.\n"
)


def test_a_rematerialization_has_the_layers_name_and_both_layouts():
    named = WARNING.replace("%s", ', metadata={op_name="jit(call)/call_exported/encoder/x"}')
    text = "W1121 0:0 1 other.cc:1] something\n" + named + named + WARNING.replace("%s", "")
    layouts = ("{devices=[1,2]0,1}", "{devices=[2,1]0,1}")
    assert summary.rematerializations(text) == [
        summary.Rematerialization("encoder/x", *layouts),
        summary.Rematerialization("%copy.1 f32[8,4]", *layouts),
    ]
    assert summary.rematerializations("") == []
