"""Reach: notices that the meeting place has been out of reach for too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_TICK_SECONDS = 0.5


class Reach:
    """Calls a function once when an agent has not met the others for some time.

    It has a thread of its own, since a request to a file server or a bucket may block for minutes.
    """

    def __init__(self, limit: float, on_loss: Callable[[], None]):
        """Prepares to watch.

        Args:
          limit: seconds without a meeting.
          on_loss: called in the thread.
        """
        self._limit, self._on_loss = limit, on_loss
        self._seconds, self._is_lost = 0.0, False
        self._closed = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._watch, name="reach", daemon=True).start()

    def met(self) -> None:
        """Notes that the agent has met the others."""
        self._seconds, self._is_lost = 0.0, False

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(_TICK_SECONDS):
            now = time.monotonic()
            # While this process was stopped, or the machine slept, nothing was out of reach.
            self._seconds += min(now - last, 2 * _TICK_SECONDS)
            last = now
            if self._seconds > self._limit and not self._is_lost:
                self._is_lost = True
                self._on_loss()
