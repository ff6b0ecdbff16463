"""Finds the instructions of a program whose results depend on some of its inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from lingvo_gshard.hlo.module import Computation, Instruction, Module

# For each array of a result, whether it depends on the inputs.
_Flags: TypeAlias = "tuple[bool, ...]"

_CALLS = ("call", "while", "conditional", "fusion")


def dependents(module: Module, inputs: Collection[int]) -> set[Instruction]:
    """Returns the instructions that some of a program's inputs, or counting, determine.

    Counting (iota) makes masks and positions, which belong to activations as well.

    Args:
      module: the program.
      inputs: numbers of the inputs.
    """
    reader = _Reader()
    reader.run(module.entry, [i in inputs for i in range(len(module.entry.parameters))])
    return reader.found


class _Reader:
    """Follows the flags of values through computations.

    Attributes:
      found: the instructions of which an array depends on the inputs.
    """

    def __init__(self):
        self.found: set[Instruction] = set()

    def run(self, computation: Computation, arguments: Sequence[bool | _Flags]) -> _Flags:
        """Returns the flags of a computation's result, given those of its parameters."""
        known: dict[Instruction, _Flags] = {}
        for instruction in computation.instructions:
            flags = self._flags(instruction, known, arguments)
            known[instruction] = flags
            if any(flags):
                self.found.add(instruction)
        return known[computation.root]

    def _flags(
        self,
        instruction: Instruction,
        known: dict[Instruction, _Flags],
        arguments: Sequence[bool | _Flags],
    ) -> _Flags:
        count = len(instruction.shape.arrays)
        operands = [known[operand] for operand in instruction.operands]
        if instruction.opcode == "parameter":
            given = arguments[instruction.proto.parameter_number]
            return (given,) * count if isinstance(given, bool) else given
        if instruction.opcode == "tuple":
            return tuple(flag for flags in operands for flag in flags)
        if instruction.opcode == "get-tuple-element":
            elements = instruction.operands[0].shape.elements or ()
            index = instruction.proto.tuple_index
            first = sum(len(element.arrays) for element in elements[:index])
            return operands[0][first : first + count]
        if instruction.opcode in _CALLS:
            return self._called(instruction, operands)
        if instruction.opcode == "opt-barrier" and operands:
            return operands[0]
        return (instruction.opcode == "iota" or any(map(any, operands)),) * count

    def _called(self, instruction: Instruction, operands: list[_Flags]) -> _Flags:
        if instruction.opcode == "while":
            flags, before = operands[0], ()
            while flags != before:
                before = flags
                after = self.run(instruction.called[0], [flags])
                flags = tuple(map(any, zip(flags, after, strict=True)))
            return flags
        if instruction.opcode == "conditional":
            branches = [
                self.run(branch, [operand])
                for branch, operand in zip(instruction.called, operands[1:], strict=True)
            ]
            return tuple(map(any, zip(*branches, strict=True)))
        return self.run(instruction.called[0], operands)
