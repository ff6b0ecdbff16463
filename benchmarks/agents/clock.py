"""Clock: simulated time, and functions that are due at some time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Time. A function that is called may spend some, which the others do not wait for.

    Attributes:
      now: seconds since the start, when the running function was called.
      spent: seconds that the running function has spent.
      skipped: seconds that were not simulated.
    """

    def __init__(self):
        """Begins at 0."""
        self.now, self.spent, self.skipped = 0.0, 0.0, 0.0
        self._due: list[tuple[float, int, Callable[[], None], float | None]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        """Returns the time of the running function."""
        return self.now + self.spent

    def awake(self) -> float:
        """Returns the time of the running function without what was skipped."""
        return self.time() - self.skipped

    def spend(self, seconds: float) -> None:
        """Lets time pass for the running function."""
        self.spent += seconds

    def at(self, time: float, function: Callable[[], None], margin: float | None = None) -> None:
        """Calls a function at a time.

        Args:
          margin: seconds before the time that are not skipped. None: the time is not fixed, but
            shifted by what is skipped.
        """
        heapq.heappush(self._due, (time, next(self._numbers), function, margin))

    def run(self, seconds: float) -> None:
        """Calls what is due for some seconds."""
        end = self.now + seconds
        self.at(end, lambda: None, 0.0)
        while self.now < end:
            time, _, function, _ = heapq.heappop(self._due)
            self.now, self.spent = max(self.now, time), 0.0
            function()

    def skip(self) -> float:
        """Shifts all that is not at a fixed time, so that nothing happens until the margin.

        Returns:
          The seconds that were skipped.
        """
        stops = [time - margin for time, _, _, margin in self._due if margin is not None]
        seconds = max(0.0, min(stops, default=self.now) - self.now)
        if seconds > 0:
            self.now += seconds
            self.skipped += seconds
            self._due = [
                (time + seconds if margin is None else time, number, function, margin)
                for time, number, function, margin in self._due
            ]
            heapq.heapify(self._due)
        return seconds
