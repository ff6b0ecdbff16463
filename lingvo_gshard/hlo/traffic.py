"""Counts the bytes that an HLO instruction reads from and writes to a device's main memory.

A fusion counts as one instruction, since the values within it are not in memory. Arrays in another
memory cause no traffic; on a TPU, memory space 1 is the vector memory. Arrays count with the
padding of their tiles.
"""

from __future__ import annotations

from lingvo_gshard.hlo import demand
from lingvo_gshard.hlo.collectives import KINDS
from lingvo_gshard.hlo.module import Instruction
from lingvo_gshard.hlo.shapes import Shape, element_bits
from lingvo_gshard.hlo.slices import megascale

FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast after-all add-dependency partition-id
    replica-id optimization-barrier opt-barrier domain while conditional call""".split()
)
_FREE_TARGETS = ("AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


def is_free(instruction: Instruction) -> bool:
    """Returns whether an instruction executes nothing itself.

    What a loop, conditional or call executes is counted by the instructions that it calls. What
    is received from other slices is counted by the instruction that sends.
    """
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")) or megascale.is_receive(instruction):
        return True
    return opcode in FREE or instruction.proto.custom_call_target in _FREE_TARGETS


def memory_bytes(instruction: Instruction) -> int:
    """Returns the bytes that one execution reads and writes."""
    if is_free(instruction):
        return 0
    if megascale.is_send(instruction):
        arrays = megascale.sent(instruction) + megascale.received(instruction)
        return round(sum(_array_bytes(array) for array in arrays))
    if instruction.opcode == "fusion":
        (called,) = instruction.called
        if called.root.proto.custom_call_target == demand.ASYNC_DONE:
            return 0
    return _read(instruction) + _written(instruction)


def _read(instruction: Instruction) -> int:
    operands = instruction.operands
    if instruction.opcode.endswith("-start"):
        reads_all = instruction.base_opcode in (*KINDS, "async", "fusion", "custom-call", "call")
        made = instruction.result.size
        amounts = [o.shape.size if reads_all else min(o.shape.size, made) for o in operands]
    else:
        amounts = demand.operand_demand(instruction, instruction.shape.size)
    used: dict[Instruction, int] = {}
    for operand, amount in zip(operands, amounts, strict=False):
        used[operand] = max(used.get(operand, 0), amount)
    return sum(_bytes(operand.shape, amount) for operand, amount in used.items())


def _written(instruction: Instruction) -> int:
    shape = instruction.result
    if instruction.opcode != "fusion":
        return _bytes(shape, min(demand.written(instruction), shape.size))
    (called,) = instruction.called
    if called.root.proto.custom_call_target == demand.ASYNC_START:
        return _bytes(shape.elements[1], shape.elements[1].size)
    if called.root.opcode != "tuple":
        return _bytes(shape, demand.written(called.root))
    return sum(
        _bytes(part, demand.written_tuple_element(made))
        for part, made in zip(shape.elements, called.root.operands, strict=True)
    )


def _bytes(shape: Shape, elements: int) -> int:
    """The bytes in main memory of a share of a shape, given by its number of elements."""
    share = elements / max(shape.size, 1)
    return round(sum(_array_bytes(array) for array in shape.arrays) * share)


def _array_bytes(array: Shape) -> float:
    """The bytes of an array in main memory."""
    return array.size * element_bits(array.dtype) / 8 * array.padding if array.space == 0 else 0.0
