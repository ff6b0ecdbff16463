"""Chooses the hosts that keep copies of a host's part of a snapshot."""

from __future__ import annotations

import collections
from collections.abc import Sequence


def distances(racks: Sequence[str], copies: int) -> tuple[int, ...]:
    """Returns the numbers of places after a host in the round, to the hosts that copy its parts.

    The distances are the same for all hosts, so that each one keeps as many copies. Those are
    chosen that put the most copies in other racks, of these the shortest.

    Args:
      racks: of the hosts, in the order of the round; "" if nobody knows, for a rack of its own.
    """
    count = len(racks)
    places: dict[str, list[int]] = {}
    for place, rack in enumerate(racks):
        places.setdefault(rack or f" {place}", []).append(place)
    # Distance -> the number of hosts whose copy would be in their own rack.
    together = collections.Counter(
        (after - before) % count for of in places.values() for before in of for after in of
    )
    return tuple(sorted(range(1, count), key=lambda d: (together[d], d))[:copies])
