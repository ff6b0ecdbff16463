"""Computes trip counts of compiled programs and of loops with all kinds of conditions."""

import jax
import jax.numpy as jnp
import pytest

from lingvo_gshard.wings.hlo import read_module
from lingvo_gshard.wings.hlo.loops import STEPS, Loop, values_of_entry
from tests.hlo.parsing import parse_module

LOOP = """
%body (p: (s32[], s32[])) -> (s32[], s32[]) {{
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}}

%condition (q: (s32[], s32[])) -> pred[] {{
  %q = (s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%q), index=0
  %n.1 = s32[] get-tuple-element(%q), index=1
  %less = pred[] compare(%i.1, %n.1), direction={direction}
  %all = s32[] constant({most})
  %within = pred[] compare(%i.1, %all), direction=LT
  ROOT %both = pred[] and(%less, %within)
}}

ENTRY %main (n: s32[]) -> s32[] {{
  %given = s32[] parameter(0)
  %limit = s32[] constant({limit})
  %first = s32[] constant({first})
  %init = (s32[], s32[]) tuple(%first, %{bound})
  %loop = (s32[], s32[]) while(%init), condition=%condition, body=%body{config}
  ROOT %r = s32[] get-tuple-element(%loop), index=0
}}
"""


def loop_of(**changes):
    values = {"step": 1, "direction": "LT", "most": 10**9, "limit": 5, "first": 0}
    text = LOOP.format(**{**values, "bound": "limit", "config": "", **changes})
    entry = parse_module(text).entry
    return Loop(entry.by_name["loop"], values_of_entry(entry))


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 5),
        ({"limit": 0}, 0),
        ({"direction": "LE"}, 6),
        ({"direction": "NE"}, 5),
        ({"step": 2}, 3),
        ({"step": -1, "direction": "GT", "first": 7, "limit": 0}, 7),
        ({"most": 3}, 3),
        ({"limit": STEPS}, STEPS),
        ({"limit": STEPS + 1}, STEPS + 1),
        ({"limit": 1_000_001, "step": 3}, 333_334),
        ({"bound": "given"}, None),
        ({"step": 0}, None),
        ({"config": ', backend_config={"known_trip_count":{"n":"12"}}', "bound": "given"}, 12),
    ],
)
def test_trip_counts_of_counter_loops(changes, count):
    loop = loop_of(**changes)
    assert loop.trip_count == count
    if count is not None and "config" not in changes:
        start, step = changes.get("first", 0), changes.get("step", 1)
        assert loop.returned(0) == start + count * step


def trip_counts(function, *arguments):
    """Returns the computed trip counts of a program's loops; ignores the CPU compiler's own."""
    entry, found = read_module(jax.jit(function).lower(*arguments).compile()).entry, []

    def visit(values):
        for instruction in values.computation.instructions:
            if instruction.opcode == "while":
                instruction.proto.backend_config = b""
                loop = Loop(instruction, values)
                found.append(loop.trip_count)
                visit(loop.first_iteration())
            elif instruction.opcode == "call":
                (called,) = instruction.called
                visit(values.within(called, *instruction.operands))

    visit(values_of_entry(entry))
    return found


X = jnp.ones((4, 4))


def test_trip_counts_of_scans_and_their_gradients():
    def run(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), c.sum()), x, None, 7)[0].sum()

    assert trip_counts(jax.grad(run), X) == [7, 7]


def test_trip_counts_of_nested_loops():
    def inner(x):
        return jax.lax.fori_loop(0, 4, lambda i, y: jnp.sin(y @ x), x)

    assert trip_counts(lambda x: jax.lax.fori_loop(2, 5, lambda i, y: inner(y), x), X) == [3, 4]


def test_data_dependent_trip_count_is_unknown():
    def run(x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: y * 2, x)

    assert trip_counts(run, X) == [None]


def test_trip_count_given_as_argument_is_unknown():
    assert trip_counts(lambda n, x: jax.lax.fori_loop(0, n, lambda i, y: y @ x, x), 3, X) == [None]


def test_trip_count_computed_by_an_earlier_loop_is_known():
    def run(x):
        count, y = jax.lax.while_loop(
            lambda s: s[0] * 3 < 20, lambda s: (s[0] + 1, jnp.sin(s[1] @ x)), (0, x)
        )
        return jax.lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] @ x), (count, y))

    assert trip_counts(run, X) == [7, 7]


def test_trip_count_after_a_long_chain_of_additions():
    chain = "".join(f"  %n{i + 1} = s32[] add(%n{i}, %one)\n" for i in range(3000))
    text = LOOP.format(
        step=1, direction="LT", most=10**9, limit=0, first=0, bound="n3000", config=""
    ).replace("  %init", f"  %one = s32[] constant(1)\n  %n0 = s32[] constant(0)\n{chain}  %init")
    entry = parse_module(text).entry
    assert Loop(entry.by_name["loop"], values_of_entry(entry)).trip_count == 3000
