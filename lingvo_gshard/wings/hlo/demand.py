"""Counts the elements of each value that a program uses: a slice reads only its part of an array.

The count goes backwards, from the used elements of a result to its operands. It passes through
fusions, which compute values only where they are used. The rules follow XLA's HloCostAnalysis,
https://github.com/openxla/xla/blob/main/xla/service/hlo_cost_analysis.cc.
"""

from __future__ import annotations

from lingvo_gshard.wings.hlo.module import Computation, Instruction

ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_SLICING = ("slice", "dynamic-slice", "gather")
_RESHAPING = ("bitcast", "reshape", "convert", "copy", "transpose", "bitcast-convert")

# These read their operands in full, however little of the result is used.
_READ_ALL = ("dot", "convolution", "sort", "custom-call", "while", "conditional", "call", "scatter")

# Marks an instruction of a TPU collective that runs in several fusions, one after the other.
_ASYNC_CONFIG = "async_collective_fusion_config"


def demand(computation: Computation) -> list[tuple[Instruction, int]]:
    """Returns the used instructions of a fusion, each with the number of elements used.

    Instructions of nested fusions are included.
    """
    used: list[tuple[Instruction, int]] = []
    _propagate(computation, computation.root.shape.size, used)
    return used


def operand_demand(instruction: Instruction, wanted: int) -> list[int]:
    """Returns the elements needed of each operand to compute `wanted` elements of the result."""
    if instruction.opcode == "fusion":
        (called,) = instruction.called
        return _propagate(called, wanted, [])
    return _operand_demand(instruction, wanted)


def written(instruction: Instruction) -> int:
    """Returns the elements that an instruction writes: only the update, if it is done in place."""
    source = _through_reshaping(instruction)
    if source.opcode == "dynamic-update-slice" and _updates_in_place(source):
        return source.operands[1].shape.size
    if source.opcode == "scatter":
        return min(source.shape.size, source.operands[-1].shape.size)
    if source.opcode == "fusion" and source.shape.elements is None:
        (called,) = source.called
        return written(called.root)
    return instruction.shape.size


def written_tuple_element(element: Instruction) -> int:
    """Returns the elements that a fusion writes of one element of its result tuple."""
    return min(written(element), _computed(element))


def is_async_collective(computation: Computation) -> bool:
    """Returns whether a fusion starts, continues or ends a collective that spans fusions."""
    return any(_ASYNC_CONFIG in i.backend_config for i in computation.instructions)


def starts_async_collective(computation: Computation) -> bool:
    """Returns whether a fusion starts such a collective."""
    return any(i.proto.custom_call_target == ASYNC_START for i in computation.instructions)


def _propagate(computation: Computation, wanted: int, used: list) -> list[int]:
    """Appends the used instructions to `used`; returns the elements needed of each parameter."""
    needed = dict.fromkeys(computation.instructions, 0)
    needed[computation.root] = wanted
    for instruction in reversed(computation.instructions):
        count = needed[instruction]
        if not count:
            continue
        used.append((instruction, count))
        if instruction.opcode == "fusion":
            (called,) = instruction.called
            amounts = _propagate(called, count, used)
        elif instruction.opcode == "tuple":
            amounts = [_computed(operand) for operand in instruction.operands]
        else:
            amounts = _operand_demand(instruction, count)
        largest: dict[Instruction, int] = {}
        for operand, amount in zip(instruction.operands, amounts, strict=False):
            largest[operand] = max(largest.get(operand, 0), amount)
        for operand, amount in largest.items():
            needed[operand] = min(operand.shape.size, needed[operand] + amount)
    return [needed[parameter] for parameter in computation.parameters]


def _computed(instruction: Instruction) -> int:
    """The elements computed for an element of a fusion's tuple; 0 if it is only passed on."""
    if instruction.opcode == "parameter" or _ASYNC_CONFIG in instruction.backend_config:
        return 0
    return instruction.shape.size


def _operand_demand(instruction: Instruction, wanted: int) -> list[int]:
    opcode, size = instruction.opcode, instruction.shape.size
    sizes = [operand.shape.size for operand in instruction.operands]
    if opcode in _SLICING:
        return [min(sizes[0], wanted), *sizes[1:]]
    if opcode == "dynamic-update-slice":
        kept = 0 if _updates_in_place(instruction) else max(wanted - sizes[1], 0)
        return [kept, *sizes[1:]]
    if opcode == "scatter":
        return [min(sizes[0], sizes[-1]), *sizes[1:]]
    if opcode in _READ_ALL or instruction.shape.elements is not None:
        return sizes
    if opcode in ("reduce", "reduce-window", "concatenate", "select-and-scatter"):
        return [-(-each * wanted // max(size, 1)) for each in sizes]
    if _ASYNC_CONFIG in instruction.backend_config:
        return [0] * len(sizes)
    return [min(each, wanted) for each in sizes]


def _updates_in_place(update: Instruction) -> bool:
    """Whether the result of an update takes over the memory of the array that it updates.

    Within a fusion, that array is a parameter. Outside of fusions XLA copies the array first where
    it must not change.
    """
    updated = _through_reshaping(update.operands[0])
    return updated.opcode == "parameter" or not update.computation.is_embedded


def _through_reshaping(instruction: Instruction) -> Instruction:
    """The instruction that computes the elements which this one only reshapes or converts."""
    while (reshaped := _reshaped(instruction)) is not None:
        instruction = reshaped
    return instruction


def _reshaped(instruction: Instruction) -> Instruction | None:
    """The operand that an instruction, or a nested fusion of such ones, only reshapes."""
    if instruction.opcode in _RESHAPING and instruction.operands:
        return instruction.operands[0]
    if instruction.opcode != "fusion" or not instruction.computation.is_embedded:
        return None
    (called,) = instruction.called
    source = _through_reshaping(called.root)
    is_passed = source.opcode == "parameter"
    return instruction.operands[called.parameters.index(source)] if is_passed else None
