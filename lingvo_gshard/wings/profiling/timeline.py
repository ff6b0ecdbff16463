"""Divides a device's time among the operations that it executes, so that the parts add up.

A device may execute several operations at once: XLA's CPU runtime runs independent operations on
several threads, and accelerators communicate while they compute. At each moment, the time goes

1. to the operations that compute, in equal parts,
2. else to the transfers in progress, in equal parts: collectives and copies that nothing hides,
3. else, within the execution of a program, to the pause between its operations,
4. else to the host: the device has nothing to do.

A transfer counts as hidden while an operation computes. Calls and loops are pauses where nothing
that they call is executed.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from lingvo_gshard.core import UserError
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.hlo import names as hlo_names
from lingvo_gshard.wings.hlo.module import Instruction
from lingvo_gshard.wings.planning.operation_rows import kind_of


class StepRange(NamedTuple):
    """The first and the last step of a profile, both included, numbered from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    @property
    def count(self) -> int:
        """Number of steps."""
        return self.last - self.first + 1

    @property
    def in_words(self) -> str:
        """The steps in words, such as "steps 20 to 23"."""
        if self.count == 1:
            return f"step {self.first:,}"
        return f"steps {self.first:,} to {self.last:,}"


def parse(text: str) -> StepRange:
    """Returns the steps of `20:23`, or of `20` for one step. Raises UserError for other texts."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if not match:
        raise UserError(
            f"`profile_steps={text}`: expected the first and the last step to profile, such "
            "as 20:23"
        )
    steps = StepRange(int(match[1]), int(match[2] or match[1]))
    if not 1 <= steps.first <= steps.last:
        raise UserError(
            f"`profile_steps={text}`: steps are numbered from 1, and the first one comes first, "
            f"such as {max(1, min(steps))}:{max(1, *steps)}"
        )
    return steps


def check_within(steps: StepRange, total: int) -> None:
    """Raises ValueError if a run of `total` steps ends before the steps to profile do."""
    if steps.last > total:
        raise UserError(
            f"`profile_steps={steps}`: the run ends with step {total:,}. Profile earlier steps, or "
            "train longer with `steps`"
        )


def check_not_taken(steps: StepRange, next_step: int) -> None:
    """Raises ValueError if a resumed run has taken the steps to profile already."""
    if steps.first < next_step:
        example = StepRange(next_step + 1, next_step + steps.count)
        raise UserError(
            f"`profile_steps={steps}`: the run resumes with step {next_step:,}. Profile later "
            f"steps, such as {example}"
        )


_ENCLOSING = ("while", "conditional", "call")
_DONE = "-done"
_NUMBER = re.compile(r"[.\d]+$")


class StepProgram:
    """Finds the operation, layer and kind of an executed instruction."""

    def __init__(
        self,
        module: hlo.Module | None,
        mesh: Mesh,
        layers: frozenset[str],
        kinds: Mapping[str, str | None],
    ):
        self._layers, self._kinds = layers, kinds
        self._instructions: dict[str, Instruction] = {}
        self.operations: list[hlo.Operation] = []
        if module is not None:
            found = hlo.read_operations(module, mesh, layers, with_unused=True)
            self.operations = found.operations
            for computation in module.computations:
                self._instructions |= computation.by_name
        self._by_name = {operation.name: operation for operation in self.operations}

    @functools.cache  # noqa: B019
    def find(self, name: str) -> hlo.Operation:
        """Returns the operation of an instruction.

        The end of an asynchronous operation counts as the operation. `hlo.read_operations` leaves
        out instructions such as arithmetic on scalars. They have a layer but no work.
        """
        if name in self._by_name:
            return self._by_name[name]
        instruction = self._instructions.get(name)
        if instruction is None:
            return hlo.Operation(name, _NUMBER.sub("", name), layer="", phase="other")
        if instruction.opcode.endswith(_DONE) and instruction.operands:
            return self.find(instruction.operands[0].name)
        op_name = hlo_names.operation_name(instruction.op_name)
        layer, phase = hlo_names.layer_and_phase(op_name, self._layers)
        return hlo.Operation(name, instruction.opcode, layer, phase, op_name=op_name)

    @functools.cache  # noqa: B019
    def kind(self, name: str) -> str:
        """Returns the kind of an instruction's operation, one of `planning.kinds.KINDS`."""
        return kind_of(self.find(name), self._kinds)

    def enclosing(self, executed: Iterable[str]) -> frozenset[str]:
        """Returns the executed loops, conditionals and calls that contain executed instructions."""
        names = set(executed)
        return frozenset(
            name
            for name in names
            if (instruction := self._instructions.get(name)) is not None
            and instruction.opcode in _ENCLOSING
            and any(
                inner.name in names
                for called in instruction.called
                for inner in called.instructions
            )
        )


class Role(enum.IntEnum):
    """The work of a device in an interval: it computes, moves data, or executes other intervals."""

    COMPUTE = 0
    TRANSFER = 1
    ENCLOSING = 2


class Interval(NamedTuple):
    """The time from start to end of something that a device does, which counts for `key`."""

    start: int
    end: int
    key: Hashable
    role: Role


@dataclasses.dataclass
class Division:
    """The division of a device's time. All times are in the unit of the intervals.

    Attributes:
      shares: the time of each key. `shares`, `pauses` and `idle` add up to the window.
      active: time from start to end of all executions of each key; shared time counts in full.
      hidden: for each key of a transfer, the part of `active` while the device computed.
      pauses: time within executions of programs and between operations.
      idle: the intervals without work for the device, in order.
    """

    shares: dict[Hashable, float]
    active: dict[Hashable, float]
    hidden: dict[Hashable, float]
    pauses: int
    idle: list[tuple[int, int]]


def divide(intervals: Iterable[Interval], window: tuple[int, int]) -> Division:
    """Divides a window of a device's time among intervals."""
    inside = [cut for each in intervals if (cut := _cut(each, window)) is not None]
    boundaries = sorted(
        [(each.start, 1, index) for index, each in enumerate(inside)]
        + [(each.end, 0, index) for index, each in enumerate(inside)]
    )
    clock = _Clock(window[0])
    for time, is_start, index in boundaries:
        clock.advance(time)
        if is_start:
            clock.begin(index, inside[index])
        else:
            clock.finish(index, inside[index])
    clock.advance(window[1])
    return clock.division


def overlap(intervals: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Returns the time that two ordered lists of disjoint intervals have in common."""
    total, index = 0, 0
    for start, end in intervals:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            total += min(end, others[at][1]) - max(start, others[at][0])
            at += 1
    return total


def _cut(interval: Interval, window: tuple[int, int]) -> Interval | None:
    start, end = max(interval.start, window[0]), min(interval.end, window[1])
    return interval._replace(start=start, end=end) if start < end else None


class _Clock:
    """Walks through a window and divides its time among the intervals that are active.

    For each role, a sum grows by the passed time over the number of active intervals. An interval's
    share is the growth of the sum from the start to the end of the interval.
    """

    def __init__(self, time: int):
        shares, active, hidden = (collections.defaultdict(float) for _ in range(3))
        self.division = Division(shares, active, hidden, 0, [])
        self._time = time
        self._counts = [0, 0, 0]
        self._shares = [0.0, 0.0]
        self._computed = 0
        self._begun: dict[int, tuple[float, int]] = {}

    def advance(self, time: int) -> None:
        """Moves on to the next time: an interval starts or ends, or the window ends."""
        passed, self._time = time - self._time, time
        if not passed:
            return
        for role in (Role.COMPUTE, Role.TRANSFER):
            if self._counts[role]:
                self._shares[role] += passed / self._counts[role]
                self._computed += passed if role == Role.COMPUTE else 0
                return
        if self._counts[Role.ENCLOSING]:
            self.division.pauses += passed
            return
        idle = self.division.idle
        if idle and idle[-1][1] == time - passed:
            idle[-1] = (idle[-1][0], time)
        else:
            idle.append((time - passed, time))

    def begin(self, index: int, interval: Interval) -> None:
        """Notes that an interval starts now."""
        self._counts[interval.role] += 1
        if interval.role != Role.ENCLOSING:
            self._begun[index] = self._shares[interval.role], self._computed

    def finish(self, index: int, interval: Interval) -> None:
        """Adds the share of an interval that ends now."""
        self._counts[interval.role] -= 1
        if interval.role == Role.ENCLOSING:
            return
        share, computed = self._begun.pop(index)
        division = self.division
        division.shares[interval.key] += self._shares[interval.role] - share
        division.active[interval.key] += interval.end - interval.start
        if interval.role == Role.TRANSFER:
            division.hidden[interval.key] += self._computed - computed
