"""Ctrl-C and SIGTERM as a request: finish the step, save, and leave in good order."""

from __future__ import annotations

import os
import signal

from lingvo_gshard.training import processes

_REQUESTS = (None, "Ctrl-C", "SIGTERM")


class StoppedError(Exception):
    """The process was asked to stop while there was nothing to finish."""


class StopRequest:
    """Turns SIGINT and SIGTERM into a request that the loop looks at between steps.

    Used as a context manager. Outside `finishing`, where nothing needs to be finished, a signal
    raises StoppedError at once; inside it sets `requested`, and a second one raises
    KeyboardInterrupt. Where several processes train together, `announce` and `agreed` make a
    request to one of them a request to all, at the same step.
    """

    def __init__(self):
        self.requested: str | None = None
        self.finishing = False
        self._previous: dict[int, object] = {}
        self._ballot: processes.Ballot | None = None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def announce(self) -> None:
        """Tells all processes of a request; each calls this before it starts the same step."""
        if processes.count() == 1:
            return
        if self._ballot is None:
            self._ballot = processes.Ballot()
        self._ballot.cast(_REQUESTS.index(self.requested))

    @property
    def agreed(self) -> str | None:
        """The request that all processes know of, one `announce` late; alone, `requested`."""
        if processes.count() == 1:
            return self.requested
        return _REQUESTS[self._ballot.highest()] if self._ballot else None

    def _receive(self, number: int, _: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if not self.finishing:
            raise StoppedError(self.requested)
        # A handler may run in the middle of a print, where another print would be an error.
        words = f"\n{self.requested}: the step is finished and saved; once more leaves at once\n"
        os.write(2, words.encode())
