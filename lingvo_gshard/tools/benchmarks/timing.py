"""Seconds that calls take, as the benchmarks count them."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(function: Callable[[], object]) -> float:
    """Returns the seconds of one call, which waits for what it does."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def pipelined_seconds(start: Callable[[], Callable[[], object]], count: int) -> float:
    """Returns the seconds of a call among `count`, each waited for when the next is started.

    start: starts one and returns what waits for it.
    """
    started = time.perf_counter()
    wait = start()
    for _ in range(count - 1):
        following = start()
        wait()
        wait = following
    wait()
    return (time.perf_counter() - started) / count
