"""Displays of commands: the stages of a plan, and how far a command that answers lines is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import rich.console

from lingvo_gshard.core import SilentProgress
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.console.spelling import with_flags
from lingvo_gshard.wings.services.progress import StageDisplay


class _StagesWithLines(StageDisplay):
    """Shows a heading before the first stage, and lines whose options are spelled as flags."""

    def __init__(self, console: rich.console.Console, heading: str):
        super().__init__(console)
        self._heading = heading
        if console.is_terminal:
            super().begin("starting")

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        if self._heading:
            self.say(self._heading)
        self._heading = ""
        super().begin(stage, unit, total)

    def say(self, text: str) -> None:
        super().say(with_flags(text))


@contextlib.contextmanager
def stages_with_lines(heading: str = "") -> Iterator[StageDisplay]:
    """Shows a line, if there is one, and stages on standard error. Long stages leave lines."""
    with _standard_error() as console, _StagesWithLines(console, heading) as stages:
        yield stages


@contextlib.contextmanager
def _standard_error() -> Iterator[rich.console.Console]:
    """Opens a console on a duplicate of standard error, which is hidden while libraries load."""
    stream, is_own = output.copy_of_standard_error()
    try:
        yield rich.console.Console(file=stream)
    finally:
        if is_own:
            stream.close()


@contextlib.contextmanager
def transient_stages(console: rich.console.Console, first: str) -> Iterator[StageDisplay]:
    """Shows stages on a terminal, and leaves no line; shows nothing elsewhere."""
    with StageDisplay(console, is_transient=True) as stages:
        stages.begin(first)
        yield stages


@contextlib.contextmanager
def stages_on_terminal() -> Iterator[StageDisplay]:
    """Shows stages on standard error if that is a terminal, for as long as a `with` block lasts."""
    with _standard_error() as console, transient_stages(console, "Starting") as stages:
        yield stages


class LineProgress(SilentProgress):
    """Shows the progress of a command that reads and answers lines. Used as a context manager.

    The display is on standard error if standard error is a terminal. It is hidden while the command
    waits for a typed line or writes answers to the terminal.

    Attributes:
      stages: the display, which also shows loading and compiling.
    """

    def __init__(self, what: str):
        """Prepares the display. `what` says how lines are answered, such as "Translating"."""
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
        """Shows that lines are being answered, after so many lines before them."""
        self._before = before
        if not self._is_on:
            self._is_on, self._first = True, before
            self.stages.begin(self._what, "lines")

    def update(self, done: int, share: float | None = None) -> None:
        """Shows how many lines of the batch are done."""
        if self._is_on:
            self.stages.update(self._before - self._first + done)

    def before_answers(self) -> None:
        """Clears the display if answers, or lines that are typed, would mix with it."""
        if self._is_on and (sys.stdout.isatty() or sys.stdin.isatty()):
            self.rest()
