"""Handles Ctrl-C and SIGTERM: finishes the step, saves, and ends the run."""

from __future__ import annotations

import os
import signal

from lingvo_gshard.training import processes

_REQUESTS = (None, "Ctrl-C", "SIGTERM")


class StoppedError(Exception):
    """A signal arrived while there was no step to finish."""


class StopRequest:
    """Turns SIGINT and SIGTERM into a request that the training loop reads between steps.

    Use it as a context manager. In a cluster, `announce` and `agreed` turn a signal to one process
    into a request that all processes see at the same step.

    Attributes:
      requested: the signal that this process received, "Ctrl-C" or "SIGTERM"; None before one.
      finishing: whether a signal lets the step finish. If False, a signal raises StoppedError. A
        second signal raises KeyboardInterrupt.
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
        """Shares this process's request. All processes call it before they start the same step."""
        if processes.count() == 1:
            return
        if self._ballot is None:
            self._ballot = processes.Ballot()
        self._ballot.cast(_REQUESTS.index(self.requested))

    @property
    def agreed(self) -> str | None:
        """The request that all processes know, as of the last `announce`."""
        if processes.count() == 1:
            return self.requested
        return _REQUESTS[self._ballot.highest()] if self._ballot else None

    def _receive(self, number: int, _: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if not self.finishing:
            raise StoppedError(self.requested)
        # The handler may interrupt a print, during which another print would be an error.
        words = (
            f"\n{self.requested}: finishing the step and saving. Repeat to quit without saving\n"
        )
        os.write(2, words.encode())
