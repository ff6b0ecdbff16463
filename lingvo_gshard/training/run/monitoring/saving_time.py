"""SavingTime: how long checkpoints and snapshots keep a run from its steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class SavingTime:
    """Measures each save: the copy of the state to the host, without the write behind it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Begins the time of the run, by a clock that returns seconds."""
        self._clock, self._began = clock, clock()
        self._seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """Measures within the context how long it takes to save a kind, such as "checkpoints"."""
        began = self._clock()
        yield
        self._seconds.setdefault(kind, []).append(self._clock() - began)

    def words(self) -> list[str]:
        """Returns a line about the saves of the run; none if there were none."""
        if not self._seconds:
            return []
        total = sum(map(sum, self._seconds.values()))
        share = total / max(self._clock() - self._began, 1e-9)
        each = [
            f"{len(seconds):,} {kind} of {sum(seconds) / len(seconds):.3g} s, {max(seconds):.3g} s "
            "at most"
            for kind, seconds in self._seconds.items()
        ]
        return [f"Saving kept the steps waiting for {share:.1%} of the time: {'; '.join(each)}"]
