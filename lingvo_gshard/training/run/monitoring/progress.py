"""Shows the progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

import rich.console
import rich.progress
import rich.table
import rich.text

from lingvo_gshard.training.run.monitoring.metrics import MetricsRow

_COMPILING = "compiling"
# Seconds until the first line of `Waiting`; the time to the next one doubles.
_FIRST_WAIT = 10.0


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


class Progress(BarOnTerminal):
    """Shows step, loss, throughput and remaining time. Use it as a context manager."""

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
        self._bar = None
        if console.is_terminal:
            columns = _columns(steps)
            self._bar = rich.progress.Progress(*columns, console=console, refresh_per_second=4)
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

    def update(self, step: int, row: MetricsRow) -> None:
        """Shows the metrics of one step."""
        if self._bar is None and step % self._every and step != self._steps:
            return
        text = self._describe(step, row)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        else:
            self.say(f"step {step:,}/{self._steps:,}  {text}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _describe(self, step: int, row: MetricsRow) -> str:
        parts = [f"loss {row['loss']:.4f}"]
        if "accuracy" in row:
            parts.append(f"accuracy {row['accuracy']:.3f}")
        more = self._digest(row) if self._digest else ""
        if more:
            parts.append(more)
        if self._rate.steps:
            parts.append(f"{self._rate.tokens:,.0f} tokens/s")
            parts.append(f"{self._rate.steps:.2f} steps/s")
            parts.append(f"{duration((self._steps - step) / self._rate.steps)} left")
        return "  ".join(parts)


class _Description(rich.progress.TextColumn):
    """The description, with the time since the start until the first step is done."""

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        """Returns the text of the column."""
        text = super().render(task)
        if task.description == _COMPILING:
            text.append(f" {duration(task.elapsed or 0)}")
        return text


def _columns(steps: int) -> tuple[rich.progress.ProgressColumn, ...]:
    """Returns the columns of a run's bar. In a narrow terminal the number of the step is kept."""
    width = len(f"step {steps:,}/{steps:,}")
    number = rich.table.Column(no_wrap=True, min_width=width)
    return (
        rich.progress.TextColumn("step {task.completed:,}/{task.total:,}", table_column=number),
        rich.progress.BarColumn(bar_width=None),
        _Description("{task.description}"),
    )


class Waiting:
    """Says after some seconds, and again after twice as many, that work is still in progress.

    Used as a context manager.
    """

    def __init__(self, what: str, say: Callable[[str], None]):
        """Prepares the lines, such as "compiling: 10 s so far".

        Args:
          what: the work.
          say: shows a line.
        """
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


def duration(seconds: float) -> str:
    """Formats seconds, such as `45 s`, `3 min 20 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
