"""HLO text as data: a module's computations, their instructions, operands and attributes.

The grammar is XLA's, https://github.com/openxla/xla/blob/main/xla/hlo/parser/hlo_parser.cc; every
instruction stands on a line of its own, as compilers print it.
"""

from __future__ import annotations

import dataclasses
import functools
import re

from lingvo_gshard.hlo.shapes import Shape, parse_shape, split

_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{\s*$")
_OPENING = re.compile(r"^(ENTRY )?%?([\w.\-]+) \{\s*$")
_BEGIN = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = ")
_ARRAY = re.compile(r"(\S+) ([a-z][a-z0-9\-]*)\(")
_TUPLE = re.compile(r"(\(.*?\)) ([a-z][a-z0-9\-]*)\(")
_OPERANDS = re.compile(r"[^()\"]*\)")
_NAME = re.compile(r"%([^\s,()]+)")
_PARENTHESIS = re.compile(r'"(?:[^"\\]|\\.)*"|[()]')
_OPERATION_NAME = re.compile(r'metadata=\{.*?op_name="((?:[^"\\]|\\.)*)"')
_BACKEND_CONFIG = "backend_config="


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a computation.

    operands: names of instructions. literal: what stands between the parentheses: the number of a
    parameter, a constant's value.
    """

    name: str
    opcode: str
    shape_text: str
    literal: str
    rest: str
    is_root: bool
    computation: Computation

    @functools.cached_property
    def shape(self) -> Shape:
        """What it returns."""
        return parse_shape(self.shape_text)

    @functools.cached_property
    def operand_names(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        if self.opcode in ("parameter", "constant", "iota"):
            return ()
        if "%" in self.literal:
            return tuple(_NAME.findall(self.literal))
        return tuple(part.split()[-1] for part in split(self.literal))

    @functools.cached_property
    def operands(self) -> list[Instruction]:
        """The instructions whose results it takes, in order."""
        return [self.computation.by_name[name] for name in self.operand_names]

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Attributes by name, as text; without the backend's configuration."""
        found = {}
        for part in split(self._before_and_after_backend_config()[0]):
            key, is_one, value = part.partition("=")
            if is_one:
                found[key] = value
        return found

    @property
    def backend_config(self) -> str:
        """What the backend's compiler says of it, as text; empty if it says nothing."""
        return self._before_and_after_backend_config()[1]

    def _before_and_after_backend_config(self) -> tuple[str, str]:
        if self.rest.startswith(_BACKEND_CONFIG):
            return "", self.rest.removeprefix(_BACKEND_CONFIG)
        before, _, after = self.rest.partition(f", {_BACKEND_CONFIG}")
        return before, after

    @functools.cached_property
    def operation_name(self) -> str:
        """The op_name of its metadata; empty if it has none."""
        match = _OPERATION_NAME.search(self.rest)
        return match[1] if match else ""

    def called(self, *attributes: str) -> list[Computation]:
        """Returns the computations that these attributes name; none for one it has not."""
        computations = self.computation.module.computations
        found = []
        for attribute in attributes:
            names = self.attributes.get(attribute, "").strip("{}")
            found += [computations[part.lstrip("%")] for part in split(names)]
        return found


@dataclasses.dataclass(eq=False)
class Computation:
    """A list of instructions, every one after its operands."""

    name: str
    module: Module
    instructions: list[Instruction] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Name -> instruction."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Name -> the instructions that take its result, in order."""
        found: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operand_names):
                found[name].append(instruction)
        return found

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        for instruction in reversed(self.instructions):
            if instruction.is_root:
                return instruction
        return self.instructions[-1]

    @property
    def is_fused(self) -> bool:
        """Whether it is what a fusion does, whose values are in no memory."""
        return self.name in self.module.fused

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """Its parameters by their numbers."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.literal))


@dataclasses.dataclass(eq=False)
class Module:
    """Computations by name, and the one that is run."""

    computations: dict[str, Computation]
    entry: Computation

    @functools.cached_property
    def fused(self) -> set[str]:
        """Names of the computations that fusions call."""
        return {
            called.name
            for computation in self.computations.values()
            for instruction in computation.instructions
            if instruction.opcode in ("fusion", "fusion-start")
            for called in instruction.called("calls")
        }


def parse_module(text: str) -> Module:
    """Returns the module of HLO text. Raises ValueError if a line cannot be read."""
    module = Module({}, None)
    computation = None
    for line in text.splitlines():
        if computation is None:
            header = _HEADER.match(line) or _OPENING.match(line)
            if header:
                computation = Computation(header[2], module)
                module.computations[computation.name] = computation
                if header[1]:
                    module.entry = computation
        elif line.startswith("}"):
            computation = None
        elif line.strip():
            computation.instructions.append(_instruction(line, computation))
    if module.entry is None:
        raise ValueError("HLO text: no ENTRY computation in it")
    return module


def _instruction(line: str, computation: Computation) -> Instruction:
    begin = _BEGIN.match(line)
    after = begin and (_TUPLE if line.startswith("(", begin.end()) else _ARRAY).match(
        line, begin.end()
    )
    if not after:
        raise ValueError(f"HLO text: no instruction in {line[:200]!r}")
    end = _closing(line, after.end())
    return Instruction(
        name=begin[2],
        opcode=after[2],
        shape_text=after[1],
        literal=line[after.end() : end],
        rest=line[end + 1 :].lstrip(", "),
        is_root=begin[1] is not None,
        computation=computation,
    )


def _closing(line: str, start: int) -> int:
    """Where the parenthesis opened before `start` closes."""
    simple = _OPERANDS.match(line, start)
    if simple:
        return simple.end() - 1
    depth = 1
    for match in _PARENTHESIS.finditer(line, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if not depth:
            return match.start()
    raise ValueError(f"HLO text: a parenthesis is not closed in {line[:200]!r}")
