"""Reads modules of small programs and of programs that jax compiles."""

import jax
import jax.numpy as jnp
from google.protobuf.unknown_fields import UnknownFieldSet

from lingvo_gshard.wings.hlo import read_module
from lingvo_gshard.wings.hlo.messages import NEWEST_INSTRUCTION_FIELD
from tests.hlo.parsing import parse_module

SMALL = """HloModule jit_f, is_scheduled=true

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1), metadata={op_name="y"}
  ROOT %add = f32[] add(%x, %y), metadata={op_name="a/(b:c)" source_file="f, g.py" source_line=3}
}

ENTRY %main.5 (a: f32[8]) -> (f32[8], f32[]) {
  %a = f32[8]{0:T(256)} parameter(0), sharding={devices=[8]<=[8]}
  %zero = f32[]{:T(256)} constant(0)
  %negated = f32[8]{0:T(256)} negate(%a), backend_config={"a":"b, calls=%x"}
  %sum = f32[]{:T(256)} reduce(%a, %zero), dimensions={0}, to_apply=%add.1
  ROOT %out = (f32[8]{0:T(256)}, /*index=1*/f32[]{:T(256)}) tuple(%a, /*index=1*/%sum)
}
"""


def test_computations_instructions_and_operands():
    module = parse_module(SMALL)
    assert module.is_scheduled
    assert [computation.name for computation in module.computations] == ["add.1", "main.5"]
    entry = module.entry
    assert entry.name == "main.5" and entry.root.name == "out"
    opcodes = [i.opcode for i in entry.instructions]
    assert opcodes == ["parameter", "constant", "negate", "reduce", "tuple"]
    assert [i.name for i in entry.parameters] == ["a"]
    total = entry.by_name["sum"]
    assert [operand.name for operand in total.operands] == ["a", "zero"]
    assert total.operands[0].shape.tile == (256,)
    assert list(total.proto.dimensions) == [0]
    assert total.called == [module.computations[0]]
    assert entry.by_name["negated"].backend_config == '{"a":"b, calls=%x"}'
    assert entry.users[entry.by_name["a"]] == [entry.by_name["negated"], total, entry.root]


def test_op_names_come_from_metadata():
    computation = parse_module(SMALL).computations[0]
    assert computation.root.op_name == "a/(b:c)"
    assert computation.by_name["x"].op_name == ""


def test_instructions_follow_the_schedule():
    """The proto lists instructions in another order, in which operands come first."""
    lines = ["%z = f32[8]{0} negate(%a)", "%y = f32[8]{0} tanh(%a)"]
    for body in (lines, lines[::-1]):
        text = (
            "HloModule m, is_scheduled=true\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"
            f"  %a = f32[8]{{0}} parameter(0)\n  {body[0]}\n  {body[1]}\n"
            "  ROOT %r = f32[8]{0} add(%y, %z)\n}\n"
        )
        expected = ["a", body[0][1], body[1][1], "r"]
        assert [i.name for i in parse_module(text).entry.instructions] == expected


def test_asynchronous_instructions():
    text = """ENTRY %main (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %s = ((f32[8,4]{1,0}), f32[2,4]{1,0:S(1)}, s32[]) slice-start(%p), slice={[0:2], [0:4]}
  %c = (f32[8,4]{1,0:S(1)}, f32[8,4]{1,0}, u32[]) copy-start(%p)
  %d = f32[8,4]{1,0:S(1)} copy-done(%c)
  ROOT %e = f32[2,4]{1,0:S(1)} slice-done(%s)
}
"""
    module = parse_module(text)
    start, copy = (module.entry.by_name[name] for name in ("s", "c"))
    assert (start.opcode, start.base_opcode) == ("async-start", "slice")
    assert start.executed.proto.slice_dimensions[0].limit == 2
    assert start.executed.computation.is_embedded and not module.entry.is_embedded
    assert start.result.dimensions == (2, 4)
    assert (copy.base_opcode, copy.executed, copy.result.space) == ("copy", copy, 1)


def test_every_instruction_of_a_compiled_program_is_read():
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ y) + i, x).sum()

    compiled = jax.jit(jax.grad(lambda x: step(x) ** 2)).lower(jnp.ones((8, 8))).compile()
    module = read_module(compiled)
    found = [i for c in module.computations for i in c.instructions]
    lines = compiled.as_text().splitlines()
    assert len(found) == sum(" = " in line and line.startswith("  ") for line in lines)
    for instruction in found:
        assert instruction.shape.size >= 0
        assert all(instruction in i.computation.users[i] for i in instruction.operands)


def test_tables_were_written_for_all_fields_that_jaxs_compiler_writes():
    """An unknown field would be ignored silently."""
    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((8, 8))).compile()
    for computation in read_module(compiled).computations:
        for instruction in computation.instructions:
            numbers = [field.field_number for field in UnknownFieldSet(instruction.proto)]
            assert max(numbers, default=0) <= NEWEST_INSTRUCTION_FIELD
