"""Asynchronous transfers: which of them move data while another instruction runs.

They are collectives, and copies between the memories of a device and its host.

Compiled programs have three forms of them:

- A pair such as all-gather-start and all-gather-done. Data moves while the device executes what the
  schedule has between the two.
- A send and a recv-done, between TPU slices.
- Several fusions of a TPU, one after the other. The first fusion starts the collective and the last
  fusion ends it. Each fusion between them computes a matrix product while the core moves a part of
  the data. No other operation runs while data moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lingvo_gshard.wings.hlo import demand, tpu_slices
from lingvo_gshard.wings.hlo.module import Computation, Instruction


class CollectivesInFlight:
    """The collectives that are under way, instruction by instruction of one computation.

    Programs without a schedule have none, because their instructions have no order of execution.
    """

    def __init__(self, computation: Computation, around: Iterable[str] = ()):
        """Begins before the first instruction. The collectives `around` are always under way."""
        self._around = tuple(around)
        self._is_scheduled = computation.module.is_scheduled
        # Names of collectives by the instruction whose result a done instruction takes.
        self._pending: dict[Instruction, list[str]] = {}
        # Names of collectives by the fusion that starts them.
        self._fused: dict[Instruction, list[str]] = {}

    def during(self, instruction: Instruction) -> tuple[str, ...]:
        """Returns the names of the collectives that move data while an instruction runs."""
        if instruction.opcode.endswith("-done"):
            self._pending.pop(_started(instruction), None)
        names = [*self._around, *(name for group in self._pending.values() for name in group)]
        names += [name for start in _carried(instruction) for name in self._fused.get(start, ())]
        return tuple(dict.fromkeys(names))

    def start(self, instruction: Instruction, names: list[str]) -> None:
        """Takes note of the collectives that the instruction of the last call of `during` starts.

        If it waits for their end, they are ignored.
        """
        if not names or not self._is_scheduled:
            return
        if tpu_slices.is_send(instruction):
            self._pending |= dict.fromkeys(tpu_slices.receives(instruction), names)
        elif instruction.opcode.endswith("-start"):
            self._pending[instruction] = names
        elif _is_part(instruction):
            self._fused[instruction] = names


def _started(done: Instruction) -> Instruction:
    """Returns the instruction that starts what another one ends."""
    (start, *_) = done.operands
    while start.opcode.endswith("-update"):
        (start, *_) = start.operands
    return start


def _is_part(instruction: Instruction) -> bool:
    """Returns whether a fusion starts, carries on or ends a collective of several fusions."""
    return instruction.opcode == "fusion" and demand.is_async_collective(instruction.called[0])


def _carried(instruction: Instruction) -> Iterator[Instruction]:
    """Yields the fusions that start the collectives which an instruction carries on or ends."""
    if not _is_part(instruction):
        return
    seen: set[Instruction] = set()
    pending = list(instruction.operands)
    while pending:
        operand = pending.pop()
        if operand in seen:
            continue
        seen.add(operand)
        if _is_part(operand):
            if demand.starts_async_collective(operand.called[0]):
                yield operand
            pending += operand.operands
        elif operand.opcode in ("get-tuple-element", "tuple", "bitcast"):
            pending += operand.operands
