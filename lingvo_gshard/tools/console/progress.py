"""Progress of work with a known total: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time

import rich.console
import rich.progress

from lingvo_gshard.training.run.monitoring.progress import BarOnTerminal, duration

_SECONDS_BETWEEN_LINES = 10.0


class Progress(BarOnTerminal):
    """Shows how much is done, how fast, and the time left. Used as a context manager."""

    def __init__(self, console: rich.console.Console, what: str, unit: str, total: int):
        """Prepares the bar.

        Args:
          console: where to show it.
          what: the work, such as "Translating".
          unit: what is counted, such as "sentences".
          total: number of units in all.
        """
        self._console = console
        self._what, self._unit, self._total = what, unit, total
        self._started = self._last_line = time.monotonic()
        self._bar = None
        if console.is_terminal:
            columns = (
                rich.progress.TextColumn(what),
                rich.progress.BarColumn(bar_width=None),
                rich.progress.TextColumn("{task.description}"),
            )
            self._bar = rich.progress.Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("compiling", total=total)

    def update(self, done: int) -> None:
        """Shows that `done` units are done."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=self._describe(done, now))
        elif done == self._total or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            text = f"{self._what}: {self._describe(done, now)}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _describe(self, done: int, now: float) -> str:
        seconds = max(now - self._started, 1e-9)
        text = f"{done:,}/{self._total:,} {self._unit}  {done / seconds:,.0f} {self._unit}/s"
        if done == self._total:
            return f"{text}  in {duration(seconds)}"
        return f"{text}  {duration(seconds * (self._total - done) / max(done, 1))} left"
