"""Display: shows the steps of a run, and how evenly its experts are used."""

from __future__ import annotations

import contextlib

from lingvo_gshard.training import Checkpoint, MetricsRow, ObservedRun, StepObserver
from lingvo_gshard.training.run.monitoring.step_observer import COMPILING
from lingvo_gshard.wings.services.expert_balance import ExpertBalance
from lingvo_gshard.wings.services.progress import StepDisplay, Waiting


class Display(StepObserver):
    """Shows a bar on a terminal, and elsewhere a line every `run.log_every_steps` steps."""

    def __init__(self, run: ObservedRun):
        """Takes the run, whose console it shows the steps on."""
        self._run = run
        self._balance = ExpertBalance()
        self._display: StepDisplay | None = None

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Opens the display before the first step."""
        if self._display is None:
            run, p = self._run, self._run.params.run
            self._display = StepDisplay(
                run.console, run.step, p.steps, p.log_every_steps, self._balance.digest
            )
            self._display.__enter__()

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Shows a step, and adds the throughput to its metrics."""
        assert self._display is not None
        self._display.count(row.get("tokens", 0.0))
        if self._display.tokens_per_second:
            row["tokens_per_second"] = self._display.tokens_per_second
        self._balance.add(row)
        self._display.update(step, row)
        p = self._run.params.run
        if step % p.log_every_steps == 0 or step == p.steps:
            self._balance.end_interval()

    def before_other_work(self, what: str, limit: float | None = None) -> None:
        """Excludes other work from the throughput, but not the saves, which have a limit."""
        if self._display and limit is None:
            self._display.pause()

    def working(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Shows other work for as long as it lasts."""
        if self._display is None:
            return contextlib.nullcontext()
        if what != COMPILING:
            return self._display.working(what)
        if self._run.console.is_terminal:
            # The progress bar says so.
            return contextlib.nullcontext()
        self._run.say(what)
        return Waiting(what, self._run.say)

    def summary(self) -> list[str]:
        """Returns lines on the balance of any experts."""
        return self._balance.summary()

    def at_end(self) -> None:
        """Closes the display."""
        if self._display is not None:
            self._display.__exit__()
