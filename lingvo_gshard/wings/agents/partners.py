"""Chooses the hosts that keep copies of a host's part of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence


def distances(racks: Sequence[str], copies: int) -> tuple[int, ...]:
    """Returns the numbers of places after a host in the round, to the hosts that copy its parts.

    The distances are the same for all hosts, so that each one keeps as many copies. Those are
    chosen that put the most copies in other racks, of these the shortest.

    Args:
      racks: of the hosts, in the order of the round; "" if nobody knows, for a rack of its own.
    """
    count = len(racks)

    def together(distance: int) -> int:
        """Returns the number of hosts whose copy would be in their own rack."""
        return sum(
            racks[i] != "" and racks[i] == racks[(i + distance) % count] for i in range(count)
        )

    return tuple(sorted(range(1, count), key=lambda d: (together(d), d))[:copies])
