"""Sightings: which hosts live, as their signs prove to this host.

Clocks of hosts may differ by hours, and who can write to the meeting place can put an old sign
back. So a sign says which signs of the other agents its own agent has read (`Beat.heard`). A sign
that names a sign of this agent was written later than that one, and thus proves that its host
lives. An old sign proves nothing, since this agent has written newer ones since.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import TypeAlias

from lingvo_gshard.wings.agents.meeting import Meeting
from lingvo_gshard.wings.agents.ray_meeting import RayMeeting
from lingvo_gshard.wings.agents.records import Beat

AnyMeeting: TypeAlias = Meeting | RayMeeting


@dataclasses.dataclass
class _Sighting:
    """One host as this one saw it.

    Attributes:
      beat: its newest sign.
      looked: when this host last looked at it, by this host's monotonic clock.
      changed: when the sign was first seen.
      expected: since when a proof is waited for, or when the last one came.
      heard: number of the newest sign of this agent that the host has read; 0 for none.
      is_proven: whether the host has proved that it lives, since this host looks at it.
    """

    beat: Beat
    looked: float
    changed: float
    expected: float
    heard: int = 0
    is_proven: bool = False


class Sightings:
    """Judges which hosts live, from the signs that one agent has read."""

    def __init__(
        self,
        meeting: AnyMeeting,
        life: str,
        lost_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begins without knowing anybody.

        Args:
          life: of this agent, as in its signs.
          lost_seconds: a host that has proved nothing for so long is lost.
          clock: returns seconds.
        """
        self._meeting, self._life = meeting, life
        self._lost_seconds, self._clock = lost_seconds, clock
        self._seen: dict[str, _Sighting] = {}
        # Number and time of this agent's own signs.
        self._written: collections.deque[tuple[int, float]] = collections.deque()

    def wrote(self, count: int) -> None:
        """Notes that this agent gives the sign of a number."""
        now = self._clock()
        self._written.append((count, now))
        while now - self._written[0][1] > 2 * self._lost_seconds:
            self._written.popleft()

    def heard(self) -> dict[str, int]:
        """Returns life -> number of the newest sign, for all agents that were looked at lately."""
        now = self._clock()
        return {
            one.beat.life: one.beat.count
            for one in self._seen.values()
            if now - max(one.looked, one.changed) <= self._lost_seconds
        }

    def look(
        self, host: str, life: str | None = None, is_glance: bool = False, beat: Beat | None = None
    ) -> Beat | None:
        """Reads the sign of a host. Returns its newest one; None if there is none.

        Args:
          host: its name.
          life: the agent that the newest record names for the host: believed to live until an agent
            of the host proves that it lives. None: no agent is believed.
          is_glance: whether the sign is only read, so that its host can prove later that it lives.
            Nothing is expected of the host yet.
          beat: the sign, if it was read before.
        """
        beat = beat or self._meeting.beat(host)
        if beat is None and self._meeting.tells_losses:
            self._seen.pop(host, None)
        known, now = self._seen.get(host), self._clock()
        if known is None:
            if beat is None:
                return None
            known = self._seen[host] = _Sighting(beat, -float("inf"), now, now)
        elif beat is not None and self._is_newer(beat, known, life, now):
            known.beat, known.changed = beat, now
        if not is_glance:
            if now - known.looked > self._lost_seconds / 2:
                # Until now, nothing was expected, or this process was stopped.
                known.expected, known.is_proven = now, False
            known.looked = now
        if beat is known.beat:
            self._note_proof(known, now)
        return known.beat

    def is_lost(self, host: str) -> bool:
        """Returns whether a host that is looked at does not prove that it lives."""
        known = self._seen.get(host)
        if known is None:
            return True
        return self._clock() - min(known.expected, known.changed) > self._lost_seconds

    def lives(self, host: str) -> bool:
        """Returns whether a host proves that it lives."""
        return not self.is_lost(host) and self._seen[host].is_proven

    def is_stale(self, host: str) -> bool:
        """Returns whether no new sign of a host was seen for half of the time until it is lost."""
        known = self._seen.get(host)
        return known is None or self._clock() - known.changed > self._lost_seconds / 2

    def misses_some(self, share: float = 1 / 3) -> bool:
        """Returns whether a living host has given no proof for a share of `lost_seconds`."""
        now, least = self._clock(), share * self._lost_seconds
        return any(
            one.is_proven and least < now - one.expected <= self._lost_seconds
            for one in self._seen.values()
        )

    def _is_newer(self, beat: Beat, known: _Sighting, life: str | None, now: float) -> bool:
        if beat.life == known.beat.life:
            return beat.count > known.beat.count
        proves = known.is_proven and now - known.expected <= self._lost_seconds
        # Of two agents that ran on the host, the later one has read a later sign of this agent.
        return beat.heard.get(self._life, 0) > known.heard or (beat.life == life and not proves)

    def _note_proof(self, known: _Sighting, now: float) -> None:
        number = known.beat.heard.get(self._life, 0)
        oldest = self._written[0][0] if self._written else 0
        if number > known.heard and number >= oldest:
            known.heard, known.expected, known.is_proven = number, now, True
