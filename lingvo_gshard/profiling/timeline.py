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
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Role(enum.IntEnum):
    """The work of a device in an interval: it computes, moves data, or executes other intervals."""

    COMPUTE = 0
    TRANSFER = 1
    ENCLOSING = 2


class Interval(NamedTuple):
    """The time from start to end of something that a device does.

    Attributes:
      start: start.
      end: end, not before the start.
      key: what to count the time for.
      role: what the device does.
    """

    start: int
    end: int
    key: Hashable
    role: Role


@dataclasses.dataclass
class Division:
    """The division of a device's time. All times are in the unit of the intervals.

    Attributes:
      shares: the time of each key. With `pauses` and `idle` they add up to the window.
      active: time from start to end of all executions of each key; shared time counts in full.
      hidden: for each key of a transfer, the part of `active` in which the device computed.
      pauses: time within executions of programs and between operations.
      idle: the intervals in which the device had nothing to do, in order.
    """

    shares: dict[Hashable, float]
    active: dict[Hashable, float]
    hidden: dict[Hashable, float]
    pauses: int
    idle: list[tuple[int, int]]


def divide(intervals: Iterable[Interval], window: tuple[int, int]) -> Division:
    """Divides a window of a device's time among intervals.

    Args:
      intervals: what the device does, in any order; parts outside of the window are cut off.
      window: start and end.
    """
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
    """Walks through a window and keeps, per role, the time that one of its intervals has got.

    An interval's share is the difference of that time between its end and its start.
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
        """Moves on to a time at which something starts or ends, or to the window's end."""
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
