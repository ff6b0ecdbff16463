"""Turns signals and a closed standard output into a request to finish the step, save, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from lingvo_gshard.training import processes
from lingvo_gshard.training.stopping import (
    EXIT_CODES,
    FINISHING,
    REPEAT_SECONDS,
    SIGNALS,
    State,
    StoppedError,
    handled_signals,
)

_REQUESTS = (None, *EXIT_CODES)


class StopRequest:
    """Turns signals into a request that the training loop reads between steps.

    Use it as a context manager. In a cluster, `announce` and `agreed` turn a request to one process
    into one that all processes see at the same step. Outside the main thread, Python allows no
    handlers, and signals keep their effect.

    Attributes:
      requested: the reason to stop that this process knows, one of `EXIT_CODES`; None before one.
      finishing: whether a request lets the step finish. If False, it raises StoppedError. A second
        signal, `REPEAT_SECONDS` later or more, raises KeyboardInterrupt.
    """

    def __init__(self):
        self.requested: str | None = None
        self.finishing = False
        self._received_at = 0.0
        self._previous: dict[int, object] = {}
        self._ballot: processes.Ballot | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in handled_signals():
                self._previous[number] = signal.signal(number, self._receive)
            State.training = self
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if State.training is self:
            State.training = None

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

    def request(self, reason: str) -> None:
        """Asks to stop for one of the reasons of `EXIT_CODES`. Later reasons are ignored.

        Raises:
          StoppedError: there is no step to finish, and this is the main thread.
        """
        if self.requested:
            return
        self.requested = reason
        if self.finishing:
            say_at_once(f"\n{reason}: finishing the step and saving")
        elif threading.current_thread() is threading.main_thread():
            raise StoppedError(reason)

    def raise_if_stopped(self) -> None:
        """Raises StoppedError if a request arrived while there was no step to finish."""
        if self.requested and not self.finishing:
            raise StoppedError(self.requested)

    def _receive(self, number: int, _: object) -> None:
        if not self.requested:
            self._received_at = time.monotonic()
            self.requested = SIGNALS[signal.Signals(number)]
            if not State.is_watched:
                self.raise_if_stopped()
                say_at_once(f"\n{self.requested}: {FINISHING}")
        elif not State.is_watched and time.monotonic() - self._received_at >= REPEAT_SECONDS:
            raise KeyboardInterrupt


def say_at_once(text: str) -> None:
    """Writes a line to standard error, also where a print may be in progress or nobody reads."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
