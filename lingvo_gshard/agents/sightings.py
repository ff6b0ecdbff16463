"""Sightings: which hosts live, judged by this host's own clock alone.

Clocks of hosts may differ by hours. So a sign has a number, not a time, and a host lives if its
sign has changed a short while ago.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from lingvo_gshard.agents.meeting import Meeting
from lingvo_gshard.agents.records import Beat


@dataclasses.dataclass
class _Sighting:
    """One host as this one saw it.

    Attributes:
      beat: its last sign.
      at: when the sign was first seen, by this host's monotonic clock.
      is_fresh: whether the sign has changed since this host first looked. A sign that has not may
        be years old.
    """

    beat: Beat
    at: float
    is_fresh: bool


class Sightings:
    """Judges which hosts live, from the signs that one agent has read."""

    def __init__(
        self, meeting: Meeting, lost_seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        """Begins without knowing anybody.

        Args:
          meeting: where the signs are.
          lost_seconds: a host whose sign has not changed for so long is lost.
          clock: returns seconds.
        """
        self._meeting, self._lost_seconds, self._clock = meeting, lost_seconds, clock
        self._seen: dict[str, _Sighting] = {}

    def look(self, host: str) -> Beat | None:
        """Reads the sign of a host and returns it; None if there is none."""
        beat = self._meeting.beat(host)
        known = self._seen.get(host)
        if beat is None:
            return known.beat if known else None
        if known is None:
            self._seen[host] = _Sighting(beat, self._clock(), is_fresh=False)
        elif (beat.life, beat.count) != (known.beat.life, known.beat.count):
            self._seen[host] = _Sighting(beat, self._clock(), is_fresh=True)
        return beat

    def is_lost(self, host: str) -> bool:
        """Returns whether a host that was looked at gives no signs any more, or never gave one."""
        known = self._seen.get(host)
        return known is None or self._clock() - known.at > self._lost_seconds

    def lives(self, host: str) -> bool:
        """Returns whether a host gives signs."""
        return not self.is_lost(host) and self._seen[host].is_fresh

    def forgive(self, seconds: float) -> None:
        """Prolongs the limit of every host, after this host itself was asleep."""
        for sighting in self._seen.values():
            sighting.at += seconds
