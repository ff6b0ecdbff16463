"""Displays of commands: the stages of a plan, and how far a command that answers lines is."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

import rich.console
import rich.progress

from lingvo_gshard.core.progress import SilentProgress, duration
from lingvo_gshard.tools.console import libraries, output
from lingvo_gshard.tools.console.spelling import with_flags
from lingvo_gshard.wings.services.progress import StageDisplay

# The spinner and the elapsed time take so many columns of a line.
_BESIDE_STAGE = 10


class Stages(SilentProgress):
    """Shows on standard error which stage runs and for how long. Used as a context manager.

    Standard error itself is hidden while a compiler works, so the stages go to a duplicate of it.
    """

    def __init__(self, heading: str = ""):
        """Prepares the display.

        Args:
          heading: a line to print before the first stage.
        """
        self._heading = heading
        self._stream, self._is_own = output.copy_of_standard_error()
        self._console = rich.console.Console(file=self._stream)
        self._started = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._spinner = None
        if self._console.is_terminal:
            columns = (
                rich.progress.SpinnerColumn(),
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.TimeElapsedColumn(),
            )
            self._spinner = rich.progress.Progress(
                *columns, console=self._console, transient=True, redirect_stderr=False
            )
            self._task = self._spinner.add_task("starting", total=None)

    def __enter__(self) -> Stages:
        if self._spinner is not None:
            self._spinner.start()
            self._stack.enter_context(libraries.warning_above(self._print))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._spinner is not None:
            self._spinner.stop()
        if self._is_own:
            self._stream.close()

    def say(self, text: str) -> None:
        """Prints a line that stays, above the spinner if there is one."""
        elapsed = duration(time.monotonic() - self._started)
        self._print(f"[{elapsed}] {with_flags(text)}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        """Shows that a stage begins.

        A stage that is wider than the terminal is printed above the spinner, which cannot wrap.
        """
        if self._heading:
            self.say(self._heading)
            self._heading = ""
        fits = len(stage) + _BESIDE_STAGE <= self._console.width
        if self._spinner is not None and fits:
            self._spinner.update(self._task, description=stage)
        else:
            self.say(stage)


@contextlib.contextmanager
def transient_stages(console: rich.console.Console, first: str) -> Iterator[StageDisplay]:
    """Shows stages on a terminal, and leaves no line; shows nothing elsewhere.

    Args:
      console: where to show them.
      first: the first stage.
    """
    with StageDisplay(console, is_transient=True) as stages:
        stages.begin(first)
        yield stages


@contextlib.contextmanager
def stages_on_terminal() -> Iterator[StageDisplay]:
    """Shows stages on standard error if that is a terminal, for as long as a `with` block lasts.

    Standard error itself is hidden while libraries are loaded, so they go to a duplicate of it.
    """
    stream, is_own = output.copy_of_standard_error()
    try:
        with transient_stages(rich.console.Console(file=stream), "Starting") as stages:
            yield stages
    finally:
        if is_own:
            stream.close()


class LineProgress(SilentProgress):
    """Shows the progress of a command that reads and answers lines. Used as a context manager.

    The display is on standard error if standard error is a terminal. It is hidden while the command
    waits for a typed line or writes answers to the terminal.

    Attributes:
      stages: the display, which also shows loading and compiling.
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

    def update(self, done: int, share: float | None = None) -> None:
        """Shows how many lines of the batch are done."""
        if self._is_on:
            self.stages.update(self._before - self._first + done)

    def before_answers(self) -> None:
        """Clears the display if answers, or lines that are typed, would mix with it."""
        if self._is_on and (sys.stdout.isatty() or sys.stdin.isatty()):
            self.rest()
