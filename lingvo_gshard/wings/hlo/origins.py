"""Attributes instructions to layers, even where the compiler dropped or replaced their names."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator

from lingvo_gshard.core import OPTIMIZER_SCOPE
from lingvo_gshard.wings.hlo import costs, tpu_slices
from lingvo_gshard.wings.hlo.module import Instruction
from lingvo_gshard.wings.hlo.names import (
    PRODUCT_NAMES,
    is_dispatch,
    is_uninformative,
    layer_and_phase,
    merged_names,
    operation_name,
)
from lingvo_gshard.wings.hlo.operations import PHASES

# The number of operations to follow back from an operation without a name.
_GENERATIONS = 8

# Opcodes whose result has the same values as their operand.
_SAME_VALUE = ("bitcast", "reshape", "copy", "transpose", "convert", "get-tuple-element")
# Collectives that XLA combines into one with several operands.
_COMBINED = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
# Opcodes whose result holds values of several origins.
_GATHERING = ("tuple", "while", "conditional", "call")


class Origins:
    """Finds the operations that instructions originate from.

    Args:
      layers: the name scopes of all layers, or None to guess an operation's layer from its name.
    """

    def __init__(self, layers: frozenset[str] | None):
        self._layers = layers

    def name(
        self,
        instruction: Instruction,
        parts: list[tuple[Instruction, int]],
        matmuls: list[Instruction],
    ) -> str:
        """Returns the name that best identifies the layer and the phase of an instruction.

        The candidates are, in this order: the names of the instruction's matrix products, its own
        name, and the most frequent name among its parts. The first candidate that belongs to a
        layer is taken. Without one, the name comes from an operation that uses the instruction's
        value, or that the value is computed from. A product with an optimizer's name computes a
        gradient that goes into it, unless the optimizer itself, such as Muon, has products.

        Args:
          parts: the instructions that it consists of, with the elements computed of each.
          matmuls: the matrix products among its parts, the largest first.
        """
        name = self._name(instruction, parts, matmuls)
        is_gradient = matmuls and not name.endswith(PRODUCT_NAMES)
        if is_gradient and self._phase(name) == PHASES.index(OPTIMIZER_SCOPE):
            return f"gradient_tape/{name.removeprefix(f'{OPTIMIZER_SCOPE}/')}"
        return name

    def is_dispatch(self, instruction: Instruction, name: str, matmuls: list[Instruction]) -> bool:
        """Returns whether an instruction's matrix product only moves tokens to experts or back.

        A product without a name does if the operations before and after it do. The experts' own
        products have dispatch only before them, and combine only after them. `name` is as `name`
        returns it, and the largest of its `matmuls` is the first.
        """
        named = [*matmuls[:1], instruction]
        if any(self._layer(operation_name(each.op_name)) for each in named):
            return bool(matmuls) and is_dispatch(name)
        neighbors = self._name_of_user(instruction), self._name_of_source(instruction)
        return bool(matmuls) and all(map(is_dispatch, neighbors))

    def _name(
        self,
        instruction: Instruction,
        parts: list[tuple[Instruction, int]],
        matmuls: list[Instruction],
    ) -> str:
        own = self._name_of_combined(instruction) or operation_name(instruction.op_name)
        for candidate in [*(operation_name(matmul.op_name) for matmul in matmuls), own]:
            if self._layer(candidate):
                return candidate
        frequent = self._most_frequent_name(parts)
        if frequent or not is_uninformative(own):
            return frequent or own
        user, source = self._name_of_user(instruction), self._name_of_source(instruction)
        if self._layer(source).startswith(f"{self._layer(user)}/"):
            user, own = source, user or own
        related = user or source
        return self._in_phase_of(own, related) if related else own

    def _layer(self, name: str) -> str:
        return layer_and_phase(name, self._layers)[0] if name else ""

    def _in_phase_of(self, own: str, name: str) -> str:
        """A related operation's name, marked as a gradient if the instruction's own name is one."""
        phases = [layer_and_phase(each, self._layers)[1] for each in (own, name)]
        is_gradient = phases[0] == "backward" != phases[1]
        return f"gradient_tape/{name}" if is_gradient else name

    def _name_of_combined(self, instruction: Instruction) -> str:
        """The name of a combined collective: of the layer with most of its bytes, or their prefix.

        It is empty for any other instruction.
        """
        if instruction.base_opcode not in _COMBINED or len(instruction.operands) < 2:
            return ""
        names = _names_of_operands(instruction)
        sizes = [operand.shape.bytes for operand in instruction.operands]
        bytes_of: collections.Counter[tuple[str, str]] = collections.Counter()
        for name, size in zip(names, sizes, strict=True):
            bytes_of[layer_and_phase(name, self._layers)] += size
        most, size = bytes_of.most_common(1)[0]
        if 2 * size > sum(sizes):
            return next(name for name in names if layer_and_phase(name, self._layers) == most)
        scopes = [name.split("/") for name in names if name]
        return "/".join([*os.path.commonprefix(scopes), instruction.opcode])

    def _most_frequent_name(self, parts: list[tuple[Instruction, int]]) -> str:
        """The name with the most elements, among the names that belong to a layer."""
        elements: collections.Counter[str] = collections.Counter()
        for part, count in parts:
            name = operation_name(part.op_name)
            if self._layer(name):
                elements[name] += count
        return elements.most_common(1)[0][0] if elements else ""

    def _name_of_user(self, instruction: Instruction) -> str:
        """The name of the same value in another form, or else of an operation that uses it.

        The earliest phase is taken: the forward pass computes what is saved for the backward pass.
        """
        users = list(_users(instruction))
        same = [user for user in users if user.opcode in _SAME_VALUE]
        for some in (sorted(same, key=lambda user: -user.shape.bytes)[:1], users):
            names = [operation_name(user.op_name) for user in some]
            names = [name for name in names if self._layer(name)]
            if names:
                return min(names, key=self._phase)
        return ""

    def _name_of_source(self, instruction: Instruction) -> str:
        """The name of the nearest operation that the value is computed from."""
        source = _source(instruction)
        for _ in range(_GENERATIONS):
            if source is None:
                break
            name = operation_name(source.op_name)
            if self._layer(name):
                return name
            source = _source(source)
        return ""

    def _phase(self, name: str) -> int:
        return PHASES.index(layer_and_phase(name, self._layers)[1])


def _names_of_operands(instruction: Instruction) -> list[str]:
    """A name for each operand of a combined collective: of its result's user, or its own."""
    merged = merged_names(instruction.op_name)
    if len(merged) == len(instruction.operands):
        return merged
    names = [operation_name(operand.op_name) for operand in instruction.operands]
    for user in instruction.computation.users[instruction]:
        if user.opcode == "get-tuple-element" and user.op_name:
            names[user.proto.tuple_index] = operation_name(user.op_name)
    return names


def _users(instruction: Instruction) -> Iterator[Instruction]:
    """The operations that use a value, also within the loops that it is passed to."""
    all_users = instruction.computation.users
    if tpu_slices.is_send(instruction):
        for result in tpu_slices.results(instruction):
            yield from all_users[result]
    for user in all_users[instruction]:
        if user.opcode not in _GATHERING:
            # The end of a prefetch has no name, and neither has the array that its parts make.
            is_unnamed = costs.is_free(user) and not operation_name(user.op_name)
            yield from _users(user) if is_unnamed else (user,)
        if user.opcode != "tuple":
            continue
        loops = [loop for loop in all_users[user] if loop.opcode == "while"]
        index = user.operands.index(instruction)
        for body in (loop.called[0] for loop in loops):
            for element in body.users[body.parameters[0]]:
                if element.opcode == "get-tuple-element" and element.proto.tuple_index == index:
                    yield from (u for u in body.users[element] if u.opcode not in _GATHERING)


def _source(instruction: Instruction) -> Instruction | None:
    """The operation that computes a tuple's element, or the largest operand of an operation."""
    if instruction.opcode == "get-tuple-element":
        index, (source,) = instruction.proto.tuple_index, instruction.operands
        if source.opcode == "while":
            source = source.called[0].root
        if source.opcode == "tuple":
            return source.operands[index]
        return None if source.opcode == "parameter" else source
    operands = [operand for operand in instruction.operands if not _is_argument(operand)]
    return max(operands, key=lambda operand: operand.shape.bytes, default=None)


def _is_argument(instruction: Instruction) -> bool:
    """Whether a value is an argument or a constant, or gathers several values."""
    if instruction.opcode == "get-tuple-element":
        return instruction.operands[0].opcode == "parameter"
    return instruction.opcode in ("constant", "parameter", *_GATHERING)
