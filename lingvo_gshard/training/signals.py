"""Ctrl-C and SIGTERM as a request: finish the step, save, and leave in good order."""

from __future__ import annotations

import os
import signal


class StoppedError(Exception):
    """The process was asked to stop while there was nothing to finish."""


class StopRequest:
    """Turns SIGINT and SIGTERM into a request that the loop looks at between steps.

    Used as a context manager. Outside `finishing`, where nothing needs to be finished, a signal
    raises StoppedError at once; inside it sets `requested`, and a second one raises
    KeyboardInterrupt.
    """

    def __init__(self):
        self.requested: str | None = None
        self.finishing = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if not self.finishing:
            raise StoppedError(self.requested)
        # A handler may run in the middle of a print, where another print would be an error.
        words = f"\n{self.requested}: the step is finished and saved; once more leaves at once\n"
        os.write(2, words.encode())
