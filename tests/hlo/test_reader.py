# tests: wings/hlo/reader.py, wings/hlo/operations.py
"""Compares layers compiled for 8 virtual CPU devices with closed forms."""

import collections

import jax
import jax.numpy as jnp
import pytest

from lingvo_gshard.core.scopes import loop_name
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo import read_module, read_operations
from tests.hlo.parsing import operations_of_text
from tests.planning.compiled_layers import B, E, H, L, M, N, S, compiled, operations

D = M // N
C = 2 * S // E
FLOAT = 4
DEVICES = 8

# Multiply-adds of the forward pass on all devices together.
FEED_FORWARD = 2 * B * L * M * H
ATTENTION = 4 * B * L * M * N * D + 2 * B * L * L * N * D
EXPERTS = 2 * B * L // S * E * C * M * H
ROUTER = B * L * M * E
DISPATCH = B * L * E * C * M

loops = pytest.mark.parametrize("loops", [(), (5,), (3, 2)])


def times_of(loops):
    total = 1
    for count in loops:
        total *= count
    return total


def flops(found, **wanted):
    return sum(
        o.times * o.matmul_flops
        for o in found.operations
        if all(getattr(o, name) == value for name, value in wanted.items())
    )


def calls(found):
    """Executions per step by (kind, axes, group size, dtype, bytes, phase)."""
    counted = collections.Counter()
    for o in found.operations:
        if o.collective:
            c = o.collective
            counted[c.kind, c.axes, c.group_size, c.dtype, c.bytes, o.phase] += o.times
    return counted


@loops
@pytest.mark.parametrize(("kind", "products"), [("feed_forward", FEED_FORWARD)])
def test_data_parallel(kind, products, loops):
    found = operations(kind, "data=8", "data", loops, gradients=True)
    times = times_of(loops)
    assert found.notes == []
    assert flops(found, layer=kind, phase="forward") == 2 * products * times // DEVICES
    assert flops(found, layer=kind, phase="backward") == 2 * 2 * products * times // DEVICES
    assert flops(found) == 3 * 2 * products * times // DEVICES
    weights = 2 * M * H + M + H
    counted = calls(found)
    assert sum(count * key[4] for key, count in counted.items()) >= FLOAT * weights
    assert {key[:4] for key in counted} == {("all-reduce", ("data",), 8, "float32")}


@loops
def test_tensor_parallel_attention(loops):
    found = operations("attention", "model=8", "tensor", loops, gradients=True)
    times = times_of(loops)
    assert flops(found, layer="attention", phase="forward") == 2 * ATTENTION * times // DEVICES
    assert flops(found, layer="attention", phase="backward") == 4 * ATTENTION * times // DEVICES
    # The sums of the output and of its gradient. XLA combines them where it can.
    moved = collections.Counter()
    for (kind, axes, size, dtype, bytes_of_one, _), count in calls(found).items():
        moved[kind, axes, size, dtype] += count * bytes_of_one
    assert moved == {("all-reduce", ("model",), 8, "float32"): 2 * times * FLOAT * B * L * M}


@loops
@pytest.mark.parametrize("dispatch", ["gather", "einsum"])
def test_expert_parallel_cost(dispatch, loops):
    found = operations(dispatch, "data=8", "expert", loops)
    times = times_of(loops)
    moving = 2 * DISPATCH if dispatch == "einsum" else 0
    expected = 2 * (EXPERTS + ROUTER + moving) * times // DEVICES
    assert flops(found, phase="forward") == flops(found) == expected
    assert flops(found, layer="moe/router") == 2 * ROUTER * times // DEVICES
    part = FLOAT * (B * L // S) * E * C * M // DEVICES
    assert calls(found) == {("all-to-all", ("data",), 8, "float32", part, "forward"): 2 * times}


def test_gradients_of_experts():
    found = operations("gather", "data=8", "expert", (5,), gradients=True)
    assert flops(found, phase="forward") == 2 * (EXPERTS + ROUTER) * 5 // DEVICES
    assert flops(found, phase="backward") == 4 * (EXPERTS + ROUTER) * 5 // DEVICES
    part = FLOAT * (B * L // S) * E * C * M // DEVICES
    counted = calls(found)
    for phase in ("forward", "backward"):
        assert counted["all-to-all", ("data",), 8, "float32", part, phase] == 10
    summed = {key: n for key, n in counted.items() if key[0] == "all-reduce"}
    assert sum(n * key[4] for key, n in summed.items()) in (FLOAT * M * E, 5 * FLOAT * M * E)
    assert {key[5] for key in summed} == {"backward"}


def test_collectives_over_different_axes_are_separate():
    found = operations("gather", "data=4,model=2", "expert_tensor")
    kinds = {(key[0], key[1], key[2]): count for key, count in calls(found).items()}
    assert kinds == {("all-to-all", ("data",), 4): 2, ("all-reduce", ("model",), 2): 1}


@pytest.mark.parametrize("partitioner", ["gspmd", "shardy"])
def test_both_partitioners(partitioner):
    found = operations("feed_forward", "model=8", "tensor", partitioner=partitioner)
    assert flops(found) == 2 * FEED_FORWARD // DEVICES
    whole = FLOAT * B * L * M
    assert calls(found) == {("all-reduce", ("model",), 8, "float32", whole, "forward"): 1}


def test_bytes_match_xlas_cost_analysis():
    """XLA counts programs without loops in the same way."""
    program = compiled("feed_forward", "data=8", "data", gradients=True)
    found = operations("feed_forward", "data=8", "data", gradients=True)
    counted = sum(o.bytes for o in found.operations)
    assert counted == pytest.approx(program.cost_analysis()["bytes accessed"], rel=0.01)


CONDITIONAL = """
%small (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %n = f32[8,8]{1,0} negate(%a)
}

%large (b: f32[8,8]) -> f32[8,8] {
  %b = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%s), index=1
  %y = f32[8,8]{1,0} conditional(%i, %x, %x), branch_computations={%small, %large}
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%i, %y)
}

%condition (s: (s32[], f32[8,8])) -> pred[] {
  %s = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %c = pred[] compare(%i, %i), direction=LT
}

ENTRY %main (n: s32[], x: f32[8,8]) -> (s32[], f32[8,8]) {
  %n = s32[] parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  %t = (s32[], f32[8,8]{1,0}) tuple(%n, %x)
  ROOT %w = (s32[], f32[8,8]{1,0}) while(%t), condition=%condition, body=%body
}
"""


def test_larger_branch_counts_and_unknown_trip_count_is_noted():
    found = operations_of_text(CONDITIONAL, Mesh.parse("data=1"))
    assert [(o.name, o.matmul_flops, o.bytes) for o in found.operations] == [
        ("d", 2 * 8**3, 2 * 8 * 8 * 4)
    ]
    (note,) = found.notes
    assert "loop w" in note


@pytest.mark.parametrize(("name", "times"), [(loop_name(7), 7), ("other", 1)])
def test_a_loop_of_unknown_length_counts_as_its_name_tells(name, times):
    def run(count, x):
        with jax.named_scope(name):
            return jax.lax.fori_loop(0, count, lambda i, y: y @ x, x)

    # A cache of compiled programs would take programs for equal that differ by a name alone.
    x = jnp.ones((8 + times, 8 + times))
    module = read_module(jax.jit(run).lower(3, x).compile())
    found = read_operations(module, Mesh.parse("data=1"))
    assert {o.times for o in found.operations if o.matmul_flops} == {times}
    assert any("depends on data" in note for note in found.notes)
