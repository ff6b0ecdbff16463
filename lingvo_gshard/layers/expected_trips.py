"""Names of loops that tell the planner how often a loop runs whose trip count depends on data.

A compiled program does not say how many iterations such a loop has. The layer that makes the loop
knows how many are usual, such as those under balanced loads, and passes them on in the loop's name.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"expected_(\d+)_trips")


def loop_name(trips: int) -> str:
    """Returns the name of a loop that usually has this many iterations, for `tf.while_loop`."""
    return f"expected_{trips}_trips"


def trips_of(name: str) -> int | None:
    """Returns the usual iterations of a loop by the name of its operation; None if it has none."""
    found = _NAME.findall(name)
    return int(found[-1]) if found else None
