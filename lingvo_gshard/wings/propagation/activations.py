"""Lists the activations of a step, each with its sharding and who has chosen it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import msgspec

from lingvo_gshard.runtime import Array
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.training import STEP_PARTS, StatePart
from lingvo_gshard.wings.hlo import module as modules
from lingvo_gshard.wings.hlo.names import operation_name
from lingvo_gshard.wings.propagation.propagated import Chosen, Traced, chosen

# Phases of tensors that are activations. The task's own operations belong to no layer.
_PHASES = ("forward", "other")
# Opcodes that compute nothing, or whose results XLA hardly ever stores.
_NO_RESULT = ("parameter", "constant", "iota", "broadcast", "tuple", "bitcast")


class Activation(msgspec.Struct, frozen=True):
    """A tensor that a line of a layer computes.

    Attributes:
      layer: path of the layer; "" for the task itself.
      operations: TensorFlow's types of the operations that compute it, such as ("MatMul", "Relu").
      layout: letters of its annotation; "" if it has none.
      asked: the sharding that its annotation asks for; "" if it has none.
      chosen: its sharding, which XLA chooses where nothing is asked.
      parts: number of different parts; 1 if every device holds the whole tensor.
      bytes_per_device: bytes of the largest part.
      source: the line of code that computes the tensor, such as "my_layer.py:12"; "" if unknown.
    """

    layer: str
    operations: tuple[str, ...]
    layout: str
    dtype: str
    shape: tuple[int, ...]
    asked: str
    chosen: str
    parts: int
    bytes: int
    bytes_per_device: int
    source: str


def activations(
    module: modules.Module, inputs: tuple[Array, ...], traced: Traced, mesh: Mesh
) -> list[Activation]:
    """Returns the activations of a step's forward pass, by layer in the order of tracing.

    Tensors that one line computes are one activation if they have the same shape, type and
    sharding. Values that follow from weights alone are no activations.

    Args:
      module: the program before it is partitioned, with shardings.
    """
    is_weight = [_is_sharded(array.path) for array in inputs]
    relevant = dependents(module, [i for i, skip in enumerate(is_weight) if not skip])
    found: dict[tuple, tuple[tuple[int, int], Activation]] = {}
    for instruction in _instructions(module):
        name = operation_name(instruction.op_name)
        layer, phase = traced.layer(name)
        division = chosen(instruction, mesh)
        if instruction not in relevant or phase not in _PHASES or division is None:
            continue
        new = _activation(instruction, division, layer, name, traced)
        if not (layer or new.source):
            # Sums of gradients, and weights.
            continue
        key = (layer, new.source or name, new.shape, new.dtype, division)
        position = traced.position(layer, name)
        if key in found:
            other, known = found[key]
            position, new = min(position, other), _merged(known, new)
        found[key] = position, new
    return [row for _, row in sorted(found.values(), key=lambda pair: pair[0])]


def _instructions(module: modules.Module) -> Iterator[modules.Instruction]:
    """Yields the instructions that compute the tensors of layers."""
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode not in _NO_RESULT and instruction.shape.dimensions:
                yield instruction


def _activation(
    instruction: modules.Instruction, division: Chosen, layer: str, name: str, traced: Traced
) -> Activation:
    shape, dtype = instruction.shape.dimensions, instruction.shape.dtype
    itemsize = max(modules.element_bits(dtype) // 8, 1)
    annotation, kind = traced.annotation(name, division), traced.kind(name)
    layout = annotation.layout if annotation else ""
    return Activation(
        layer=layer,
        operations=() if annotation or not kind else (kind,),
        layout=layout,
        dtype=modules.numpy_name(dtype),
        shape=shape,
        asked=annotation.in_words() if annotation else "",
        chosen=division.in_words(layout),
        parts=division.parts,
        bytes=instruction.shape.bytes,
        bytes_per_device=division.bytes_on_device(shape, itemsize),
        source=traced.lines.line(name),
    )


def _merged(one: Activation, other: Activation) -> Activation:
    """Returns one activation for two tensors of a line, with the annotation of either."""
    both = dict.fromkeys((*one.operations, *other.operations))
    annotated = one if one.asked or not other.asked else other
    return msgspec.structs.replace(annotated, operations=tuple(both))


# For each array of a result, whether it depends on the inputs.
_Flags: TypeAlias = "tuple[bool, ...]"

_CALLS = ("call", "while", "conditional", "fusion")


def dependents(module: modules.Module, inputs: Collection[int]) -> set[modules.Instruction]:
    """Returns the instructions whose values depend on some of a program's inputs, or on counting.

    Counting (iota) makes masks and positions, which belong to activations as well.
    """
    reader = _Reader()
    reader.run(module.entry, [i in inputs for i in range(len(module.entry.parameters))])
    return reader.found


class _Reader:
    """Follows the flags of values through computations.

    Attributes:
      found: the instructions with an array that depends on the inputs.
    """

    def __init__(self):
        self.found: set[modules.Instruction] = set()

    def run(self, computation: modules.Computation, arguments: Sequence[bool | _Flags]) -> _Flags:
        """Returns the flags of a computation's result, given the flags of its parameters."""
        known: dict[modules.Instruction, _Flags] = {}
        for instruction in computation.instructions:
            flags = self._flags(instruction, known, arguments)
            known[instruction] = flags
            if any(flags):
                self.found.add(instruction)
        return known[computation.root]

    def _flags(
        self,
        instruction: modules.Instruction,
        known: dict[modules.Instruction, _Flags],
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

    def _called(self, instruction: modules.Instruction, operands: list[_Flags]) -> _Flags:
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


def _is_sharded(path: str) -> bool:
    """Returns whether an array of a state, such as theta.output.w, is of a part that is split."""
    part = path.partition(".")[0]
    parts = [p for p in STEP_PARTS if issubclass(p, StatePart)]
    return part in ("theta", "moments", *(p.name for p in parts if p.split_as))
