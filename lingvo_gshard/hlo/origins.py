"""From which layer an instruction comes, also where the compiler left no name or a useless one."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator

from lingvo_gshard.hlo.collectives import base_opcode
from lingvo_gshard.hlo.names import (
    OPTIMIZER,
    is_dispatch,
    merged_names,
    operation_name,
    says_nothing,
    split_operation_name,
)
from lingvo_gshard.hlo.operation import PHASES
from lingvo_gshard.hlo.text import Instruction

# How far back one without a name looks for one.
_GENERATIONS = 8

_SAME_VALUE = ("bitcast", "reshape", "copy", "transpose", "convert", "get-tuple-element")
_COMBINED = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
_GATHERING = ("tuple", "while", "conditional", "call")


class Origins:
    """Names of instructions, for known scopes of layers, or None where they are not known."""

    def __init__(self, layers: frozenset[str] | None):
        self._layers = layers

    def name(
        self,
        instruction: Instruction,
        parts: list[tuple[Instruction, int]],
        matmuls: list[Instruction],
    ) -> str:
        """Returns the op_name that says best where an instruction comes from.

        parts: what it stands for, with weights. matmuls: the matrix products of these, the largest
        first. It is the name of the largest product, its own, or the most frequent in it, if any is
        of a layer; else that of a value which it makes, goes into or is made from. An optimizer has
        no products: what goes into it is a gradient.
        """
        name = self._name(instruction, parts, matmuls)
        if matmuls and self._phase(name) == PHASES.index(OPTIMIZER):
            return f"gradient_tape/{name.removeprefix(f'{OPTIMIZER}/')}"
        return name

    def is_dispatch(self, instruction: Instruction, name: str, matmuls: list[Instruction]) -> bool:
        """Whether an instruction of that name has a product that moves tokens to experts or back.

        The experts' own products stand between those: without a name they do not count as either.
        """
        named = [*matmuls[:1], instruction]
        if any(self._layer(operation_name(one.operation_name)) for one in named):
            return bool(matmuls) and is_dispatch(name)
        around = self._of_users(instruction), self._of_sources(instruction)
        return bool(matmuls) and all(map(is_dispatch, around))

    def _name(
        self,
        instruction: Instruction,
        parts: list[tuple[Instruction, int]],
        matmuls: list[Instruction],
    ) -> str:
        own = self._of_combined(instruction) or operation_name(instruction.operation_name)
        for candidate in [*(operation_name(matmul.operation_name) for matmul in matmuls), own]:
            if self._layer(candidate):
                return candidate
        found = self._most_frequent(parts)
        if found or not says_nothing(own):
            return found or own
        user, source = self._of_users(instruction), self._of_sources(instruction)
        if self._layer(source).startswith(f"{self._layer(user)}/"):
            user, own = source, user or own
        related = user or source
        return self._in_phase_of(own, related) if related else own

    def _layer(self, name: str) -> str:
        return split_operation_name(name, self._layers)[0] if name else ""

    def _in_phase_of(self, own: str, name: str) -> str:
        """A relative's name; of a gradient, if the instruction's own is of one."""
        phases = [split_operation_name(each, self._layers)[1] for each in (own, name)]
        is_gradient = phases[0] == "backward" != phases[1]
        return f"gradient_tape/{name}" if is_gradient else name

    def _of_combined(self, instruction: Instruction) -> str:
        """The name of a collective of several arrays: of the layer of most bytes, or of all."""
        if base_opcode(instruction) not in _COMBINED or len(instruction.operands) < 2:
            return ""
        names = _names_of_elements(instruction)
        sizes = [operand.shape.bytes for operand in instruction.operands]
        total: collections.Counter[tuple[str, str]] = collections.Counter()
        for name, size in zip(names, sizes, strict=True):
            total[split_operation_name(name, self._layers)] += size
        most, size = total.most_common(1)[0]
        if 2 * size > sum(sizes):
            return next(n for n in names if split_operation_name(n, self._layers) == most)
        named = [name.split("/") for name in names if name]
        return "/".join([*os.path.commonprefix(named), instruction.opcode])

    def _most_frequent(self, parts: list[tuple[Instruction, int]]) -> str:
        """The name, of a layer, with the most elements."""
        votes: collections.Counter[str] = collections.Counter()
        for part, count in parts:
            name = operation_name(part.operation_name)
            if self._layer(name):
                votes[name] += count
        return votes.most_common(1)[0][0] if votes else ""

    def _of_users(self, instruction: Instruction) -> str:
        """The name of the same value in another form, or of what takes it, in the earliest phase.

        What is kept for the backward pass is made in the forward one.
        """
        users = list(_users(instruction))
        same = [user for user in users if user.opcode in _SAME_VALUE]
        for some in (sorted(same, key=lambda user: -user.shape.bytes)[:1], users):
            names = [operation_name(user.operation_name) for user in some]
            names = [name for name in names if self._layer(name)]
            if names:
                return min(names, key=self._phase)
        return ""

    def _of_sources(self, instruction: Instruction) -> str:
        """The name of the nearest of what it is made from."""
        source = _made_from(instruction)
        for _ in range(_GENERATIONS):
            if source is None:
                break
            name = operation_name(source.operation_name)
            if self._layer(name):
                return name
            source = _made_from(source)
        return ""

    def _phase(self, name: str) -> int:
        return PHASES.index(split_operation_name(name, self._layers)[1])


def _names_of_elements(instruction: Instruction) -> list[str]:
    """A name for each operand of a combined collective, by what takes its result, or by its own."""
    merged = merged_names(instruction.operation_name)
    if len(merged) == len(instruction.operands):
        return merged
    names = [operation_name(operand.operation_name) for operand in instruction.operands]
    for user in instruction.computation.users[instruction.name]:
        if user.opcode == "get-tuple-element" and user.operation_name:
            names[int(user.attributes["index"])] = operation_name(user.operation_name)
    return names


def _users(instruction: Instruction) -> Iterator[Instruction]:
    """What takes the value, and what takes it in the loops into which it is passed."""
    all_users = instruction.computation.users
    for user in all_users[instruction.name]:
        if user.opcode not in _GATHERING:
            yield user
        if user.opcode != "tuple":
            continue
        loops = [loop for loop in all_users[user.name] if loop.opcode == "while"]
        for body in (body for loop in loops for body in loop.called("body")):
            index = user.operand_names.index(instruction.name)
            for element in body.users[body.parameters[0].name]:
                if element.attributes.get("index") == str(index):
                    yield from (u for u in body.users[element.name] if u.opcode not in _GATHERING)


def _made_from(instruction: Instruction) -> Instruction | None:
    """What made a value, or the largest that went into it; of a loop, what its body does."""
    if instruction.opcode == "get-tuple-element":
        index, (source,) = int(instruction.attributes["index"]), instruction.operands
        if source.opcode == "while":
            (body,) = source.called("body")
            source = body.root
        if source.opcode == "tuple":
            return source.operands[index]
        return None if source.opcode == "parameter" else source
    operands = [o for o in instruction.operands if not _is_given(o)]
    return max(operands, key=lambda operand: operand.shape.bytes, default=None)


def _is_given(instruction: Instruction) -> bool:
    """Whether a computation is given it, or it is all it is given or gives."""
    if instruction.opcode == "get-tuple-element":
        return instruction.operands[0].opcode == "parameter"
    return instruction.opcode in ("constant", "parameter", *_GATHERING)
