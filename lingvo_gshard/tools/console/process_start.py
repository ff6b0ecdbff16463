"""The first things of a process: standard streams that are open, and signals that end it tidily.

Python runs a signal handler only between two operations of the main thread, so not while a library
is loaded or XLA compiles. An exception raised by a handler may also crash a library that is being
loaded, or be swallowed by it. A thread that is woken by the signal itself has none of these limits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import IO, TextIO, cast

from lingvo_gshard.api.closed_output import GuardedStream
from lingvo_gshard.core import EXIT_CODES, signals

_SHOW_CURSOR = b"\x1b[?25h"


class SignalWatch:
    """Handles SIGINT, SIGTERM and SIGHUP for a command, as a context manager around all of it.

    A signal ends the process at once with exit code 128 plus the signal's number. During training,
    the first signal lets the loop finish its step and save. Signals that follow at once change
    nothing.
    """

    def __init__(self, name: str):
        """Prepares to watch for a command's name, which starts the line that a signal prints."""
        self._name = name
        self._saving_since: float | None = None
        # A copy, since standard error is hidden while TensorFlow is imported.
        self._screen = os.dup(2)
        self._pipe, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)

    def __enter__(self) -> SignalWatch:
        signals.State.is_watched = True
        threading.Thread(target=self._watch, name="signal watch", daemon=True).start()
        for number in signals.handled_signals():
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        # Everything is done: a signal that arrives now would only spoil the end.
        for number in signals.handled_signals():
            signal.signal(number, signal.SIG_IGN)

    def _watch(self) -> None:
        while received := os.read(self._pipe, 1):
            number = received[0]
            if number in signals.SIGNALS:
                self._on_signal(signals.SIGNALS[signal.Signals(number)])

    def _on_signal(self, name: str) -> None:
        training = signals.State.training
        if self._saving_since is not None:
            if time.monotonic() - self._saving_since < signals.REPEAT_SECONDS:
                return
            self._say(f"{self._name}: {name}: ended at once, without saving")
        elif training is None:
            self._say(f"{self._name}: stopped by {name}")
        elif training.finishing:
            self._saving_since = time.monotonic()
            self._say(f"\n{self._name}: {name}: {signals.FINISHING}")
            return
        else:
            self._say(f"{self._name}: {name}: stopped before the first step; nothing is lost")
        self._end(EXIT_CODES[name])

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._screen, f"{text}\n".encode())

    def _end(self, code: int) -> None:
        signals.State.exit_code = code
        for function in list(signals.State.before_abrupt_end):
            with contextlib.suppress(Exception):
                function()
        if os.isatty(self._screen):
            with contextlib.suppress(OSError):
                os.write(self._screen, _SHOW_CURSOR)
        os._exit(code)


def open_closed_streams() -> None:
    """Opens the null device for standard streams that are closed.

    Otherwise the next opened file would take the place of a closed stream, and receive what
    libraries print.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest descriptor that is free is this one.
            os.open(os.devnull, os.O_RDWR)
    if not isinstance(sys.stderr, GuardedStream):
        # A message that nobody reads any more is no reason to fail.
        sys.stderr = cast(TextIO, GuardedStream(_own_standard_error(), lambda: None))


def _own_standard_error() -> IO[str]:
    """Returns a stream on a copy of descriptor 2, so that redirecting libraries spares our lines.

    A stream that something else has put in the place of standard error stays.
    """
    if sys.stderr is not None:
        try:
            if sys.stderr.fileno() != 2:
                return sys.stderr
        except (OSError, ValueError):
            return sys.stderr
    encoding = sys.stderr.encoding if sys.stderr else "utf-8"
    return os.fdopen(os.dup(2), "w", encoding=encoding, errors="backslashreplace", buffering=1)
