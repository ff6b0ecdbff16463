"""Reads which instructions move arrays between the memories of a device and its host."""

from __future__ import annotations

from lingvo_gshard.wings.hlo import costs
from lingvo_gshard.wings.hlo.module import Instruction, Shape
from lingvo_gshard.wings.hlo.operations import HostTransfer

# HLO shows arrays in host memory as S(5): XLA's compilers for TPUs and GPUs agree on the number.
HOST_SPACE = 5
_SLICE, _UPDATE = "dynamic-slice", "dynamic-update-slice"


def host_transfer(instruction: Instruction) -> HostTransfer | None:
    """Returns what an instruction moves to the host or from it; None if it moves nothing.

    Of a stack in host memory, slices are read and written.
    """
    if costs.is_free(instruction):
        return None
    result = instruction.result
    reads_host = any(_is_on_host(operand.shape) for operand in instruction.operands)
    writes_host = _is_on_host(result)
    if not (reads_host or writes_host):
        return None
    moved = _moved(instruction)
    if moved.opcode == _UPDATE:
        update = moved.operands[1].shape
        return HostTransfer(_bytes(update), to_host=True) if writes_host else None
    if reads_host and writes_host:
        return None
    return HostTransfer(_bytes(moved.shape if moved.opcode == _SLICE else result), writes_host)


def _moved(instruction: Instruction) -> Instruction:
    """Returns the instruction that reads or writes a slice, also within a fusion."""
    found = instruction.executed
    while found.opcode in ("fusion", "bitcast"):
        found = found.called[0].root if found.opcode == "fusion" else found.operands[0]
    return found


def _is_on_host(shape: Shape) -> bool:
    return any(array.space == HOST_SPACE for array in shape.arrays)


def _bytes(shape: Shape) -> int:
    return round(sum(array.bytes * array.padding for array in shape.arrays))
