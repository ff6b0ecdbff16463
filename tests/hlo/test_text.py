"""The parser of HLO text, on lines as compilers print them and on whole programs."""

import jax
import jax.numpy as jnp
import pytest

from lingvo_gshard.hlo.text import parse_module

SMALL = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "a(b).py"

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1), metadata={op_name="y"}
  ROOT %add = f32[] add(%x, %y), metadata={op_name="a/(b:c)" source_file="f, g.py" source_line=3}
}

%branch (p: (f32[8], s32[])) -> f32[8] {
  %p = (f32[8]{0:T(256)}, /*index=1*/s32[]{:T(256)}) parameter(0)
  ROOT %first = f32[8]{0:T(256)} get-tuple-element(%p), index=0
}, execution_thread="other"

ENTRY %main.5 (a: f32[8]) -> (f32[8], f32[]) {
  %a = f32[8]{0:T(256)} parameter(0), sharding={devices=[8]<=[8]}
  %zero = f32[]{:T(256)} constant(0)
  %text = u8[3]{0} constant({1, 2, 3}), backend_config={"a":"b, calls=%x}"}
  %sum = f32[]{:T(256)} reduce(%a, %zero), dimensions={0}, to_apply=%add.1
  ROOT %out = (f32[8]{0:T(256)}, /*index=1*/f32[]{:T(256)}) tuple(%a, /*index=1*/%sum)
}
"""


def test_computations_instructions_and_attributes():
    module = parse_module(SMALL)
    assert list(module.computations) == ["add.1", "branch", "main.5"]
    entry = module.entry
    assert entry.name == "main.5" and entry.root.name == "out"
    assert [i.opcode for i in entry.instructions] == [
        "parameter",
        "constant",
        "constant",
        "reduce",
        "tuple",
    ]
    total = entry.by_name["sum"]
    assert total.operand_names == ("a", "zero")
    assert total.operands[0].shape.tile == (256,)
    assert total.attributes["dimensions"] == "{0}"
    assert total.called("to_apply", "calls") == [module.computations["add.1"]]
    assert entry.by_name["text"].literal == "{1, 2, 3}"
    assert entry.by_name["text"].attributes == {}
    assert "calls" in entry.by_name["text"].backend_config
    assert entry.root.operand_names == ("a", "sum")
    assert entry.users["a"] == [total, entry.root]


def test_names_are_those_in_the_metadata():
    module = parse_module(SMALL)
    assert module.computations["add.1"].root.operation_name == "a/(b:c)"
    assert module.computations["add.1"].by_name["x"].operation_name == ""


def test_operands_may_come_with_their_types_or_without_percent_signs():
    module = parse_module(
        "ENTRY main {\n"
        "  a = f32[2,3]{1,0} parameter(0)\n"
        '  ROOT b = f32[2,3]{1,0} add(f32[2,3]{1,0} a, f32[2,3]{1,0} a), metadata={op_name="x"}\n'
        "}\n"
    )
    assert module.entry.root.operand_names == ("a", "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HloModule m\n", "no ENTRY"),
        ("ENTRY %m () -> f32[] {\n  what is this\n}\n", "what is this"),
    ],
)
def test_text_that_is_no_module_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_module(text)


def test_every_line_of_a_compiled_program_is_read():
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ y) + i, x).sum()

    text = jax.jit(jax.grad(lambda x: step(x) ** 2)).lower(jnp.ones((8, 8))).compile().as_text()
    module = parse_module(text)
    found = [i for c in module.computations.values() for i in c.instructions]
    assert len(found) == sum(" = " in line and line.startswith("  ") for line in text.splitlines())
    for instruction in found:
        assert instruction.shape.size >= 0
        assert len(instruction.operands) == len(instruction.operand_names)


def test_large_programs_are_read_line_by_line():
    """Sixteen megabytes; what looked at pairs of lines would not return."""
    rest = 'add(%a, %a), metadata={op_name="x"}, backend_config={"k":"' + "v" * 400 + '"}'
    body = "".join(f"  %add.{i} = f32[8]{{0}} {rest}\n" for i in range(40_000))
    text = f"ENTRY %main (a: f32[8]) -> f32[8] {{\n  %a = f32[8]{{0}} parameter(0)\n{body}}}\n"
    assert len(text) > 15e6
    module = parse_module(text)
    assert len(module.entry.instructions) == 40_001
    assert len(module.entry.users["a"]) == 40_000
