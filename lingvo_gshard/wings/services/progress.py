"""Displays of a run: its stages and its steps, as a bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import rich.console
import rich.progress
import rich.table
import rich.text

from lingvo_gshard.core.progress import Stage, duration
from lingvo_gshard.training import MetricsRow

_COMPILING = "compiling"
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
          console: where to show it.
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


class BarOnTerminal:
    """Base of context managers that show `_bar`, which is None without a terminal."""

    _bar: rich.progress.Progress | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class StepDisplay(BarOnTerminal):
    """Shows step, time left, loss and rate. Use it as a context manager.

    On a terminal, what the experts do and the rate in tokens stand on a second line, so that the
    first one fits 80 columns.
    """

    def __init__(
        self,
        console: rich.console.Console,
        step: int,
        steps: int,
        every: int,
        digest: Callable[[MetricsRow], str] | None = None,
    ):
        """Makes the display of one run.

        Args:
          console: where to show it.
          step: the step that the run resumes from.
          steps: the last step of the run.
          every: steps between plain lines, if there is no terminal.
          digest: maps a step's metrics to further text to show.
        """
        self._console = console
        self._digest = digest
        self._steps = steps
        self._every = every
        self._bar = self._steps_bar = None
        if console.is_terminal:
            self._bar = self._steps_bar = _StepBar(steps, console)
            self._task = self._bar.add_task(_COMPILING, total=steps, completed=step)
        self._rate = _Rate()

    @property
    def tokens_per_second(self) -> float:
        """Throughput, averaged over about fifty steps."""
        return self._rate.tokens

    def count(self, tokens: float) -> None:
        """Counts a step towards the throughput.

        Args:
          tokens: number of tokens in the step's batch.
        """
        self._rate.add(tokens)

    def pause(self) -> None:
        """Excludes the time until the next step from the throughput."""
        self._rate.pause()

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Shows other work than steps, with the seconds that it takes, for as long as it lasts.

        Without a terminal, only work that takes long is said, by `Waiting`.

        Args:
          what: the work, such as "compiling the evaluation".
        """
        if self._steps_bar is None:
            with Waiting(what, self.say):
                yield
            return
        self._steps_bar.begin_work(what)
        try:
            yield
        finally:
            self._steps_bar.end_work()

    def update(self, step: int, row: MetricsRow) -> None:
        """Shows the metrics of one step."""
        bar = self._steps_bar
        if bar is None and step % self._every and step != self._steps:
            return
        loss, more = f"loss {row['loss']:.4f}", self._more(row)
        left, rates = self._speed(step)
        if bar is not None:
            first, second = [*left, loss, *rates[:1]], [*more, *rates[1:]]
            bar.update(self._task, completed=step, description="  ".join(first))
            bar.second_line = "  ".join(second)
        else:
            text = "  ".join([loss, *more, *reversed(rates), *left])
            self.say(f"step {step:,}/{self._steps:,}  {text}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _more(self, row: MetricsRow) -> list[str]:
        """Returns the accuracy and what the digest has, if there are any."""
        accuracy = [f"accuracy {row['accuracy']:.3f}"] if "accuracy" in row else []
        digest = self._digest(row) if self._digest else ""
        return [*accuracy, digest] if digest else accuracy

    def _speed(self, step: int) -> tuple[list[str], list[str]]:
        """Returns the time left, and the rates in steps and in tokens; none before the second."""
        if not self._rate.steps:
            return [], []
        left = f"{duration((self._steps - step) / self._rate.steps)} left"
        return [left], [f"{self._rate.steps:.2f} steps/s", f"{self._rate.tokens:,.0f} tokens/s"]


class _StepBar(rich.progress.Progress):
    """The bar of a run with a second line, and with the work that steps wait for.

    Attributes:
      second_line: what stands below the bar.
    """

    def __init__(self, steps: int, console: rich.console.Console):
        """Makes the bar of a run of some steps."""
        self.second_line = ""
        self._work: str | None = None
        self._since = 0.0
        columns = _columns(steps, console.width)
        super().__init__(*columns, console=console, refresh_per_second=4)

    def begin_work(self, what: str) -> None:
        """Shows work in place of the second line."""
        self._work, self._since = what, time.monotonic()

    def end_work(self) -> None:
        """Shows the second line again."""
        self._work = None

    def get_renderables(self) -> Iterator[rich.console.RenderableType]:
        """Yields the bar, and the second line if there is one."""
        yield from super().get_renderables()
        text = self.second_line
        if self._work is not None:
            text = f"{self._work} {duration(time.monotonic() - self._since)}"
        if text:
            yield rich.text.Text(f"  {text}", no_wrap=True, overflow="ellipsis")


class _Description(rich.progress.TextColumn):
    """The description, with the time since the start until the first step is done."""

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        """Returns the text of the column."""
        text = super().render(task)
        if task.description == _COMPILING:
            text.append(f" {duration(task.elapsed or 0)}")
        return text


# Columns of "12 h 59 min left  loss 12.3456  123.45 steps/s" and of two spaces.
_BESIDE_BAR = 50
# Narrower, a bar shows nothing.
_LEAST_BAR = 8


def _columns(steps: int, width: int) -> tuple[rich.progress.ProgressColumn, ...]:
    """Returns the columns of a run's bar. A narrow terminal cuts the description at its end."""
    widest = len(f"step {steps:,}/{steps:,}")
    number = rich.table.Column(no_wrap=True, min_width=widest)
    bar = rich.table.Column(no_wrap=True, min_width=_LEAST_BAR)
    text = rich.table.Column(no_wrap=True, overflow="ellipsis")
    bar_width = max(width - widest - _BESIDE_BAR, _LEAST_BAR)
    return (
        rich.progress.TextColumn("step {task.completed:,}/{task.total:,}", table_column=number),
        rich.progress.BarColumn(bar_width=bar_width, table_column=bar),
        _Description("{task.description}", table_column=text),
    )


class Waiting:
    """Says after some seconds, and again after twice as many, that work is still in progress.

    Used as a context manager.
    """

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


class _Rate:
    """Steps and tokens per second, averaged exponentially over about fifty steps."""

    def __init__(self):
        self.steps = 0.0
        self.tokens = 0.0
        self._sums = [0.0, 0.0, 0.0]
        self._last: float | None = None

    def add(self, tokens: float) -> None:
        now = time.monotonic()
        if self._last is not None:
            added = (now - self._last, 1.0, tokens)
            self._sums = [0.98 * total + new for total, new in zip(self._sums, added, strict=True)]
            seconds, steps, tokens = self._sums
            self.steps, self.tokens = steps / max(seconds, 1e-9), tokens / max(seconds, 1e-9)
        self._last = now

    def pause(self) -> None:
        self._last = None
