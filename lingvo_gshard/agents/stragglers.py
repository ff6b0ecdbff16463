"""Stragglers: names the hosts that are slower than the other hosts of their round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from lingvo_gshard.agents.records import Beat, Record

# A host is slow if it takes so many times as long as the median of the others.
_FACTOR = 1.5
# The limit exists because shorter waits for batches hardly delay a step.
_LEAST_WAIT = 0.05


class Stragglers:
    """Finds slow hosts, and names each once in a round for each cause."""

    def __init__(self):
        self._named: set[tuple[int, str, str]] = set()

    def found(self, record: Record, beats: Mapping[str, Beat]) -> list[str]:
        """Returns a line for each slow host that was not named before.

        Args:
          record: the round.
          beats: host -> its sign.
        """
        signs = [beats[member.host] for member in record.members if member.host in beats]
        probes = {sign.host: sign.probe_seconds for sign in signs if sign.probe_seconds}
        waits = {
            sign.host: max(sign.input_seconds, _LEAST_WAIT)
            for sign in signs
            if sign.input_seconds is not None
        }
        lines = []
        for cause, seconds in (
            ("its devices take {own:.3g} s for what takes {others:.3g} s elsewhere", probes),
            ("it waits {own:.3g} s for a batch, the others {others:.3g} s", waits),
        ):
            for host, own in seconds.items():
                others = [value for other, value in seconds.items() if other != host]
                if not others or own < _FACTOR * statistics.median(others):
                    continue
                key = record.number, host, cause
                if key not in self._named:
                    self._named.add(key)
                    usual = statistics.median(others)
                    words = cause.format(own=own, others=usual)
                    lines.append(f"Slow host {host}: {own / usual:.1f} times as slow; {words}")
        return lines
