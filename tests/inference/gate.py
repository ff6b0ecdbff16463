"""Holds back programs of an engine, as a compiler does that takes long."""

import contextlib
import threading


class Gate:
    """Programs that are not made until the gate opens, also those that were there before.

    What was compiled once is not compiled again, which would take seconds.

    Attributes:
      asked: set when the first of them is wanted.
    """

    def __init__(self, executables, holds, error=None):
        self.asked, self._open = threading.Event(), threading.Event()
        self._executables, self._holds, self._error = executables, holds, error
        self._compile = executables._compile
        self._kept = executables.__dict__.setdefault("kept", {})
        for key in filter(holds, list(executables._compiled)):
            self._kept[key] = executables._compiled.pop(key)

    def compile(self, key):
        if self._holds(key):
            self.asked.set()
            self._open.wait()
            if self._error:
                raise self._error
        if key not in self._kept:
            self._kept[key] = self._compile(key)
        return self._kept[key]

    def open(self):
        self._open.set()


@contextlib.contextmanager
def gate(executables, holds, error=None):
    """Holds back the programs whose keys `holds` is true for, until the end of the context."""
    made = Gate(executables, holds, error)
    executables._compile = made.compile
    try:
        yield made
    finally:
        made.open()
        del executables._compile
