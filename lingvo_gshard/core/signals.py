"""Turns signals and a closed standard output into a request to finish the step, save, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

from lingvo_gshard.core.processes import Ballot, count

CLOSED_OUTPUT = "closed standard output"
# Signal -> its name in messages.
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
# Reason to stop -> exit code: 128 plus the signal's number, as shells have it.
EXIT_CODES = {name: 128 + number for number, name in SIGNALS.items()}
EXIT_CODES[CLOSED_OUTPUT] = 128 + signal.SIGPIPE

# A signal repeats another only after this time: schedulers and hands may send several at once.
REPEAT_SECONDS = 2.0
FINISHING = (
    f"finishing the step and saving. Repeat after {REPEAT_SECONDS:.0f} s to quit without saving"
)


class StoppedError(KeyboardInterrupt):
    """A request to stop arrived while there was nothing to save.

    It is a KeyboardInterrupt, so that neither `except Exception` nor asyncio swallows it.
    """


class State:
    """The process's knowledge of requests to stop.

    Attributes:
      is_watched: whether a thread prints signals as they arrive and ends the process in time.
      training: the request of the training in progress; None if there is none.
      exit_code: the exit code of a process that a signal ends. It is set before the functions in
        `before_abrupt_end` are called.
      before_abrupt_end: functions to call before the process ends without exceptions.
    """

    is_watched = False
    training: StopRequest | None = None
    exit_code = 1
    before_abrupt_end: ClassVar[list[Callable[[], None]]] = []


def handled_signals() -> list[int]:
    """Returns the signals to handle: all of `SIGNALS`, without a SIGHUP that nohup ignores."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGHUP or not ignored]


@contextlib.contextmanager
def called_before_abrupt_end(function: Callable[[], None]) -> Iterator[None]:
    """Has a function called if a signal ends the process inside the context."""
    State.before_abrupt_end.append(function)
    try:
        yield
    finally:
        State.before_abrupt_end.remove(function)


def end_abruptly(code: int) -> NoReturn:
    """Ends the process at once, after what must be done before."""
    State.exit_code = code
    for function in list(State.before_abrupt_end):
        with contextlib.suppress(Exception):
            function()
    os._exit(code)


class TrainingFailedError(RuntimeError):
    """Training cannot go on. The message names the step, the reason and a remedy.

    Checkpoints that were saved before remain. In a cluster all processes raise it.
    """


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
        self._previous: dict[int, Any] = {}
        self._ballot: Ballot | None = None

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
        if count() == 1:
            return
        if self._ballot is None:
            self._ballot = Ballot()
        self._ballot.cast(_REQUESTS.index(self.requested))

    @property
    def agreed(self) -> str | None:
        """The request that all processes know, as of the last `announce`."""
        if count() == 1:
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
