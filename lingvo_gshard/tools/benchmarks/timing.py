"""Measures the duration of calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.core import Progress


def seconds_of(function: Callable[[], object]) -> float:
    """Returns the seconds of one call. The call must wait for its own results."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def pipelined_seconds(start: Callable[[], Callable[[], object]], count: int) -> float:
    """Returns the mean seconds of `count` calls, each awaited after the next one has started.

    Args:
      start: starts a call and returns a function that waits for it.
    """
    started = time.perf_counter()
    wait = start()
    for _ in range(count - 1):
        following = start()
        wait()
        wait = following
    wait()
    return (time.perf_counter() - started) / count


def in_turns(
    clocks: Sequence[Callable[[], float]], repeats: int, progress: Progress, what: str = "measuring"
) -> np.ndarray:
    """Calls clocks in turns and returns the seconds that they return, [clocks, repeats].

    They alternate, since the speed of a shared machine changes.
    """
    turns = []
    for repeat in range(repeats):
        progress.begin(f"{what}, {repeat + 1} of {repeats}")
        turns.append([clock() for clock in clocks])
    return np.array(turns).T
