"""Shows the stages of long work, as a bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import rich.console
import rich.progress

from lingvo_gshard.core import Stage, duration

# Seconds until the first line of `Waiting`; the time to the next one doubles.
_FIRST_WAIT = 10.0
# Seconds of the shortest stage that leaves a line.
_SHORTEST_SHOWN = 2.0
# Seconds between two lines on a stage, and on one whose total is known.
_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_COUNTS = 10.0
# Seconds until the first amount of data is announced.
_ANNOUNCED = 1.0


class StageDisplay:
    """Shows the stages of long work: a bar on a terminal, a line every some seconds elsewhere.

    A `Progress`, and a context manager. A stage of some seconds leaves a line with its duration.
    Without a terminal the first amount of data that takes a second is announced. A stage whose
    total is known leaves a line only there, once all is done.
    """

    def __init__(self, console: rich.console.Console, is_transient: bool = False):
        """Prepares the display, which the first stage opens.

        Args:
          is_transient: whether no line is left, and nothing is shown without a terminal.
        """
        self._console, self._is_transient = console, is_transient
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._stage: Stage | None = None
        self._last_line = 0.0
        self._is_announced = False
        self._inner: list[Stage] = []
        self._bar: rich.progress.Progress | None = None
        self._ticker = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> Self:
        if self._has_lines:
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

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        """Ends the current stage and shows the next one."""
        if self._closed.is_set():
            return
        with self._lock:
            self._end_stage()
            self._stage = Stage(stage, unit, total)
            self._last_line = time.monotonic()
            if self._console.is_terminal:
                if self._bar is None:
                    self._bar = self._open_bar()
                self._bar.reset(self._task, total=None, description=stage)

    def update(self, done: int, share: float | None = None) -> None:
        """Shows how far the stage is."""
        with self._lock:
            stage = self._stage
            if stage is None:
                return
            stage.update(done, share)
            if self._bar is not None:
                completed, total = (None, None) if stage.share is None else (100 * stage.share, 100)
                text = stage.describe()
                self._bar.update(self._task, completed=completed, total=total, description=text)
            elif stage.total is not None and self._has_lines:
                if stage.is_complete or self._is_due(_SECONDS_BETWEEN_COUNTS):
                    self.say(stage.describe())

    @contextlib.contextmanager
    def within(self, stage: str) -> Iterator[None]:
        """Shows work within the current stage, below it on a terminal."""
        work = Stage(stage)
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

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._console.is_terminal or not self._is_transient:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def _has_lines(self) -> bool:
        return not self._console.is_terminal and not self._is_transient

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
        self._task = bar.add_task("", total=None)
        bar.start()
        return bar

    def _end_stage(self) -> None:
        """Prints the duration of a stage that took some seconds and has no total."""
        stage = self._stage
        if stage is not None and stage.total is None and not self._is_transient:
            if stage.seconds >= _SHORTEST_SHOWN:
                self.say(f"{stage.name}: {duration(stage.seconds)}")
        self._stage = None

    def _print_lines(self) -> None:
        while not self._closed.wait(_SHORTEST_SHOWN / 4):
            with self._lock:
                stage = self._stage
                if stage is None or stage.total is not None:
                    continue
                if stage.unit and not self._is_announced and stage.seconds >= _ANNOUNCED:
                    self._is_announced = True
                    self.say(stage.name)
                if self._is_due(_SECONDS_BETWEEN_LINES):
                    is_within = not stage.done and self._inner
                    self.say((self._inner[-1] if is_within else stage).describe())

    def _is_due(self, seconds: float) -> bool:
        """Returns whether the last line is some seconds old; then the next one is due now."""
        now = time.monotonic()
        if now - self._last_line < seconds:
            return False
        self._last_line = now
        return True


class Waiting:
    """Says after some seconds, then after twice as many, that work goes on. A context manager."""

    def __init__(self, what: str, say: Callable[[str], None]):
        """Prepares the lines, such as "compiling: 10 s so far"."""
        self._what, self._say = what, say
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _print_lines(self) -> None:
        started, seconds = time.monotonic(), _FIRST_WAIT
        while not self._is_done.wait(seconds):
            self._say(f"{self._what}: {duration(time.monotonic() - started)} so far")
            seconds *= 2
