# tests: wings/propagation/activations.py
"""Which instructions depend on a program's inputs, in calls, branches and loops."""

from lingvo_gshard.wings.propagation.activations import dependents
from tests.hlo.parsing import parse_module

LOOP = """
%body (state: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {
  %state = (s32[], f32[4], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %moved = f32[4] get-tuple-element(%state), index=1
  %kept = f32[4] get-tuple-element(%state), index=2
  %squared = f32[4] multiply(%kept, %kept)
  %sum = f32[4] add(%moved, %kept)
  ROOT %next = (s32[], f32[4], f32[4]) tuple(%i, %sum, %squared)
}

%condition (state: (s32[], f32[4], f32[4])) -> pred[] {
  %state = (s32[], f32[4], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (x: f32[4], w: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %w = f32[4] parameter(1)
  %zero = s32[] constant(0)
  %twice = f32[4] add(%w, %w)
  %count = s32[4] iota(), iota_dimension=0
  %init = (s32[], f32[4], f32[4]) tuple(%zero, %x, %twice)
  %loop = (s32[], f32[4], f32[4]) while(%init), condition=%condition, body=%body
  ROOT %result = f32[4] get-tuple-element(%loop), index=1
}
"""


def names(inputs):
    return {each.name for each in dependents(parse_module(LOOP), inputs)}


def test_the_arrays_of_a_loop_are_told_apart():
    found = names([0])
    assert {"x", "moved", "sum", "result", "loop", "count"} <= found
    assert not {"w", "twice", "kept", "squared", "i", "zero"} & found


def test_what_a_loop_adds_up_depends_on_all_that_is_added():
    found = names([1])
    assert {"w", "twice", "kept", "squared", "moved", "sum", "result"} <= found
    assert "x" not in found


def test_counting_is_not_a_weight():
    assert names([]) == {"count"}
