"""Stragglers: names the hosts that are slower than the other hosts of their round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from lingvo_gshard.wings.agents.records import Beat, Record

# A host is slow if it takes so many times as long as the median of the others.
_FACTOR = 1.5
# The limit exists because shorter waits for batches hardly delay a step.
_LEAST_WAIT = 0.05
# Other work on a host makes one probe slow now and then.
_IN_A_ROW = 3


class Stragglers:
    """Finds slow hosts, and names each once in a round for each cause."""

    def __init__(self):
        self._round = 0
        # Host and cause -> the last time that was judged, and how many in a row were slow.
        self._judged: dict[tuple[str, str], tuple[float, int]] = {}

    def found(self, record: Record, beats: Mapping[str, Beat]) -> list[str]:
        """Returns a line for each host that was slow several times in a row."""
        if record.number != self._round:
            self._round, self._judged = record.number, {}
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
                if others and self._is_newly_slow(host, cause, own, statistics.median(others)):
                    usual = statistics.median(others)
                    words = cause.format(own=own, others=usual)
                    lines.append(f"Slow host {host}: {own / usual:.1f} times as slow; {words}")
        return lines

    def _is_newly_slow(self, host: str, cause: str, own: float, usual: float) -> bool:
        """Judges a time of a host. Returns True when enough in a row were slow, once."""
        last, slow = self._judged.get((host, cause), (None, 0))
        if own == last or slow >= _IN_A_ROW:
            return False
        slow = slow + 1 if own >= _FACTOR * usual else 0
        self._judged[host, cause] = own, slow
        return slow == _IN_A_ROW
