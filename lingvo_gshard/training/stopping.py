"""How a command is asked to stop, and the exit code that says so. Imports nothing that is slow."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, NoReturn

if TYPE_CHECKING:
    from lingvo_gshard.training.signals import StopRequest

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
    """What the whole process knows about requests to stop.

    Attributes:
      is_watched: whether a thread prints signals as they arrive and ends the process in time.
      training: the request of the training in progress; None if there is none.
      exit_code: the code with which a signal ends the process; set before `before_abrupt_end`.
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
