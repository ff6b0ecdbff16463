"""Bytes that an instruction of HLO reads from and writes to a device's main memory.

A fusion is one instruction: what is computed within it is in no memory. What lies in another memory
(of a TPU, S(1) is its vector memory) takes no traffic. Arrays count as they lie there, filled up to
tiles.
"""

from __future__ import annotations

from lingvo_gshard.hlo import demand
from lingvo_gshard.hlo.collectives import base_opcode, result
from lingvo_gshard.hlo.shapes import Shape, element_bits
from lingvo_gshard.hlo.summary import KINDS
from lingvo_gshard.hlo.text import Instruction

FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast after-all add-dependency partition-id
    replica-id optimization-barrier opt-barrier domain while conditional call""".split()
)
_FREE_TARGETS = ("AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


def is_free(instruction: Instruction) -> bool:
    """Whether it does nothing when the program runs, or others are counted in its place."""
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")):
        return True
    return opcode in FREE or instruction.attributes.get("custom_call_target", "").strip('"') in (
        _FREE_TARGETS
    )


def memory_bytes(instruction: Instruction) -> int:
    """Returns what one execution reads and writes."""
    if is_free(instruction):
        return 0
    if instruction.opcode == "fusion":
        (called,) = instruction.called("calls")
        if demand.ASYNC_DONE in called.root.rest:
            return 0
    return _read(instruction) + _written(instruction)


def _read(instruction: Instruction) -> int:
    operands = instruction.operands
    if instruction.opcode.endswith("-start"):
        is_whole = base_opcode(instruction) in (*KINDS, "async", "fusion", "custom-call", "call")
        made = result(instruction).size
        amounts = [o.shape.size if is_whole else min(o.shape.size, made) for o in operands]
    else:
        amounts = demand.operand_demand(instruction, instruction.shape.size)
    used: dict[str, int] = {}
    for operand, amount in zip(operands, amounts, strict=False):
        used[operand.name] = max(used.get(operand.name, 0), amount)
    shapes = {operand.name: operand.shape for operand in operands}
    return sum(_bytes(shapes[name], amount) for name, amount in used.items())


def _written(instruction: Instruction) -> int:
    shape = result(instruction)
    if instruction.opcode != "fusion":
        return _bytes(shape, demand.written(instruction))
    (called,) = instruction.called("calls")
    if demand.ASYNC_START in called.root.rest:
        return _bytes(shape.elements[1], shape.elements[1].size)
    if called.root.opcode != "tuple":
        return _bytes(shape, demand.written(called.root))
    return sum(
        _bytes(part, demand.written_of_tuple(made))
        for part, made in zip(shape.elements, called.root.operands, strict=True)
    )


def _bytes(shape: Shape, elements: int) -> int:
    """What so many of its elements take in main memory."""
    share = elements / max(shape.size, 1)
    whole = sum(
        array.size * element_bits(array.dtype) / 8 * array.padding
        for array in shape.arrays
        if array.space == 0
    )
    return round(whole * share)
