"""Shows on a terminal, and nowhere else, what a command does before it answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import rich.console

from lingvo_gshard.tools.console import output
from lingvo_gshard.training.run.monitoring.data_progress import DataProgress


@contextlib.contextmanager
def stages_on_terminal() -> Iterator[DataProgress]:
    """Shows stages on standard error if that is a terminal, for as long as a `with` block lasts.

    Standard error itself is hidden while libraries are loaded, so they go to a duplicate of it.
    """
    stream, is_own = output.copy_of_standard_error()
    try:
        with DataProgress(rich.console.Console(file=stream), is_transient=True) as stages:
            stages.begin("Starting")
            yield stages
    finally:
        if is_own:
            stream.close()


class LineProgress:
    """Shows how far a command is that reads and answers lines. Used as a context manager.

    It is shown on standard error if that is a terminal, and never while the command waits for a
    typed line or writes answers to the terminal.

    Attributes:
      stages: the display. Loading and compiling are shown there, too.
    """

    def __init__(self, what: str):
        """Prepares the display.

        Args:
          what: how lines are answered, such as "Translating".
        """
        self._what = what
        self._stack = contextlib.ExitStack()
        self._is_on, self._before, self._first = False, 0, 0

    def __enter__(self) -> LineProgress:
        self.stages = self._stack.enter_context(stages_on_terminal())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rest(self) -> None:
        """Clears the display until the next batch of lines."""
        self.stages.pause()
        self._is_on = False

    def begin_batch(self, before: int) -> None:
        """Shows that lines are being answered.

        Args:
          before: number of lines before them.
        """
        self._before = before
        if not self._is_on:
            self._is_on, self._first = True, before
            self.stages.begin(self._what, "lines")

    def update(self, done: int) -> None:
        """Shows how many lines of the batch are done."""
        if self._is_on:
            self.stages.update(self._before - self._first + done)

    def before_answers(self) -> None:
        """Clears the display if answers, or lines that are typed, would mix with it."""
        if self._is_on and (sys.stdout.isatty() or sys.stdin.isatty()):
            self.rest()
