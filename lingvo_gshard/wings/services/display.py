"""Display: shows the steps of a run, and how evenly its experts are used."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import rich.console
import rich.progress
import rich.table
import rich.text

from lingvo_gshard.core import duration
from lingvo_gshard.training import COMPILING, Checkpoint, MetricsRow, ObservedRun, StepObserver
from lingvo_gshard.wings.services.expert_balance import ExpertBalance
from lingvo_gshard.wings.services.progress import Waiting

_COMPILING = "compiling"


class Display(StepObserver):
    """Shows a bar on a terminal, and elsewhere a line every `run.log_every_steps` steps.

    Both have the step, the time left, the loss and the rate. On a terminal, what the experts do and
    the rate in tokens stand on a second line, so that the first one fits 80 columns.
    """

    def __init__(self, run: ObservedRun):
        self._run = run
        self._balance = ExpertBalance()
        self._rate = _Rate()
        self._bar: _StepBar | None = None
        self._has_begun = False

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Opens the display before the first step."""
        if not self._has_begun and self._run.console.is_terminal:
            self._bar = _StepBar(self._run)
            self._bar.start()
        self._has_begun = True

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Shows a step, and adds the throughput to its metrics."""
        self._rate.add(row.get("tokens", 0.0))
        if self._rate.tokens:
            row["tokens_per_second"] = self._rate.tokens
        self._balance.add(row)
        p = self._run.params.run
        is_shown = step % p.log_every_steps == 0 or step == p.steps
        if self._bar is not None or is_shown:
            self._show(step, row)
        if is_shown:
            self._balance.end_interval()

    def before_other_work(self, what: str, limit: float | None = None) -> None:
        """Excludes other work from the throughput, but not the saves, which have a limit."""
        if limit is None:
            self._rate.pause()

    def working(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Shows other work, with the seconds that it takes, for as long as it lasts.

        Without a terminal, only work that takes long is said, by `Waiting`.
        """
        if not self._has_begun:
            return contextlib.nullcontext()
        if self._bar is not None:
            # The bar says that it compiles.
            return contextlib.nullcontext() if what == COMPILING else self._bar.working(what)
        if what == COMPILING:
            self._run.say(what)
        return Waiting(what, self._run.say)

    def summary(self) -> list[str]:
        """Returns lines on the balance of any experts."""
        return self._balance.summary()

    def at_end(self) -> None:
        """Closes the display."""
        if self._bar is not None:
            self._bar.stop()

    def _show(self, step: int, row: MetricsRow) -> None:
        """Shows the metrics of a step; no rates before the second one."""
        steps, rate = self._run.params.run.steps, self._rate
        loss = f"loss {row['loss']:.4f}"
        accuracy = f"accuracy {row['accuracy']:.3f}" if "accuracy" in row else ""
        more = list(filter(None, [accuracy, self._balance.digest(row)]))
        left, rates = [], []
        if rate.steps:
            left = [f"{duration((steps - step) / rate.steps)} left"]
            rates = [f"{rate.steps:.2f} steps/s", f"{rate.tokens:,.0f} tokens/s"]
        if self._bar is not None:
            first, second = [*left, loss, *rates[:1]], [*more, *rates[1:]]
            self._bar.show(step, "  ".join(first), "  ".join(second))
        else:
            text = "  ".join([loss, *more, *reversed(rates), *left])
            self._run.say(f"step {step:,}/{steps:,}  {text}")


class _StepBar(rich.progress.Progress):
    """The bar of a run with a second line, and with the work that steps wait for."""

    def __init__(self, run: ObservedRun):
        """Makes the bar of a run, at the step that it resumes from."""
        steps = run.params.run.steps
        self._second_line = ""
        self._work: str | None = None
        self._since = 0.0
        columns = _columns(steps, run.console.width)
        super().__init__(*columns, console=run.console, refresh_per_second=4)
        self._task = self.add_task(_COMPILING, total=steps, completed=run.step)

    def show(self, step: int, description: str, second_line: str) -> None:
        """Shows a step."""
        self.update(self._task, completed=step, description=description)
        self._second_line = second_line

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Shows work in place of the second line, for as long as it lasts."""
        self._work, self._since = what, time.monotonic()
        try:
            yield
        finally:
            self._work = None

    def get_renderables(self) -> Iterator[rich.console.RenderableType]:
        """Yields the bar, and the second line if there is one."""
        yield from super().get_renderables()
        text = self._second_line
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
