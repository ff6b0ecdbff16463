"""DataProgress: shows the stages of long work, such as reading, cleaning and compiling."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import rich.console
import rich.progress

from lingvo_gshard.training.run.monitoring.progress import duration

# Shorter stages leave no line.
_SHORTEST_SHOWN = 2.0
_SECONDS_BETWEEN_LINES = 5.0
_ANNOUNCED = 1.0


class DataProgress:
    """Observes an input or a run: a bar on a terminal, a line every some seconds elsewhere.

    Used as a context manager. A stage of some seconds leaves a line with its duration. Without a
    terminal the first amount of data that takes a second is announced.
    """

    def __init__(self, console: rich.console.Console, is_transient: bool = False):
        """Prepares the display, which the first stage opens.

        Args:
          console: where to show it.
          is_transient: whether no line is left, and nothing is shown without a terminal.
        """
        self._console, self._is_transient = console, is_transient
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._stage = self._unit = ""
        self._is_announced = False
        self._inner: list[tuple[str, float]] = []
        self._bar: rich.progress.Progress | None = None
        self._ticker = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> DataProgress:
        if not self._console.is_terminal and not self._is_transient:
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the last stage and the display. Later stages are not shown."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.pause()
        if self._ticker.ident is not None:
            self._ticker.join()

    def pause(self) -> None:
        """Ends the last stage and clears the display until the next one begins."""
        with self._lock:
            self._end_stage()
            if self._bar is not None:
                self._bar.stop()
            self._bar = None

    def begin(self, stage: str, unit: str = "") -> None:
        """Ends the current stage and shows the next one."""
        with self._lock:
            self._end_stage()
            self._stage, self._unit = stage, unit
            self._started = self._last_line = time.monotonic()
            self._done, self._share = 0, None
            if self._console.is_terminal and not self._closed.is_set():
                if self._bar is None:
                    self._bar = self._open_bar()
                self._bar.reset(self._task, total=None, description=stage)

    def update(self, done: int, share: float | None = None) -> None:
        """Shows how far the stage is."""
        with self._lock:
            self._done, self._share = done, share
            if self._bar is not None:
                completed = None if share is None else 100 * share
                text = self._describe(time.monotonic())
                total = None if share is None else 100
                self._bar.update(self._task, completed=completed, total=total, description=text)

    @contextlib.contextmanager
    def within(self, stage: str) -> Iterator[None]:
        """Shows work within the current stage, below it on a terminal."""
        work = (stage, time.monotonic())
        with self._lock:
            bar = self._bar
            task = bar.add_task(stage, total=None) if bar else None
            self._inner.append(work)
        try:
            yield
        finally:
            with self._lock:
                self._inner.remove(work)
                if bar and task is not None:
                    bar.remove_task(task)

    def _open_bar(self) -> rich.progress.Progress:
        columns = (
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TimeElapsedColumn(),
        )
        bar = rich.progress.Progress(
            *columns, console=self._console, transient=True, redirect_stdout=not self._is_transient
        )
        self._task = bar.add_task(self._stage, total=None)
        bar.start()
        return bar

    def _end_stage(self) -> None:
        """Prints the duration of a stage that took some seconds."""
        if self._stage and not self._is_transient:
            seconds = time.monotonic() - self._started
            if seconds >= _SHORTEST_SHOWN:
                self._say(f"{self._stage}: {duration(seconds)}")
        self._stage = ""

    def _print_lines(self) -> None:
        while not self._closed.wait(_SHORTEST_SHOWN / 4):
            with self._lock:
                now = time.monotonic()
                if self._unit and not self._is_announced and now - self._started >= _ANNOUNCED:
                    self._is_announced = True
                    self._say(self._stage)
                if self._stage and now - self._last_line >= _SECONDS_BETWEEN_LINES:
                    self._last_line = now
                    self._say(self._describe(now))

    def _describe(self, now: float) -> str:
        """Returns the stage with its amount, its throughput and the time left."""
        seconds = max(now - self._started, 1e-9)
        if not self._done and self._inner and self._bar is None:
            work, started = self._inner[-1]
            return f"{work}: {duration(now - started)} so far"
        if not self._done:
            return f"{self._stage}: {duration(seconds)} so far"
        rate = f"{self._done:,} {self._unit}  {self._done / seconds:,.0f} {self._unit}/s"
        left = duration(seconds * (1 - self._share) / self._share) if self._share else ""
        return f"{self._stage}: {rate}" + (f"  {left} left" if left else "")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
