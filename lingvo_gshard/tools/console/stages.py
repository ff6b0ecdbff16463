"""Stages of work without a known total: a spinner on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import time

import rich.console
import rich.progress

from lingvo_gshard.tools.console import output
from lingvo_gshard.training.run.monitoring.progress import duration

# Columns of the spinner and the elapsed time.
_BESIDE_STAGE = 10


class Stages:
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
        return self

    def __exit__(self, *_: object) -> None:
        if self._spinner is not None:
            self._spinner.stop()
        if self._is_own:
            self._stream.close()

    def say(self, text: str) -> None:
        """Prints a line that stays, above the spinner if there is one."""
        elapsed = duration(time.monotonic() - self._started)
        self._console.print(f"[{elapsed}] {text}", markup=False, highlight=False, soft_wrap=True)

    def begin(self, stage: str) -> None:
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
