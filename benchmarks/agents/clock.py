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
        self._due: list[tuple[float, int, Callable[[], None], bool]] = []
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

    def at(self, time: float, function: Callable[[], None], is_fixed: bool = False) -> None:
        """Calls a function at a time. A fixed time is not shifted by what is skipped."""
        heapq.heappush(self._due, (time, next(self._numbers), function, is_fixed))

    def run(self, seconds: float) -> None:
        """Calls what is due for some seconds."""
        end = self.now + seconds
        self.at(end, lambda: None, is_fixed=True)
        while self.now < end:
            time, _, function, _ = heapq.heappop(self._due)
            self.now, self.spent = max(self.now, time), 0.0
            function()

    def skip(self, margin: float) -> None:
        """Shifts all that is not at a fixed time, so that nothing happens meanwhile.

        Args:
          margin: how long before the next fixed time to stop.
        """
        fixed = min((time for time, _, _, is_fixed in self._due if is_fixed), default=self.now)
        seconds = fixed - margin - self.now
        if seconds > 0:
            self.now += seconds
            self.skipped += seconds
            self._due = [
                (time if is_fixed else time + seconds, number, function, is_fixed)
                for time, number, function, is_fixed in self._due
            ]
            heapq.heapify(self._due)
