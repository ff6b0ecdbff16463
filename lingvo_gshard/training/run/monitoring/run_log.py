"""RunLog: what a run shows and writes, step by step, and its spikes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import rich.console

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.tasks.evaluation import perplexity
from lingvo_gshard.training.run import processes
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.run.monitoring.compilations import (
    Compilation,
    CompilationWatch,
    append_compilation,
)
from lingvo_gshard.training.run.monitoring.divergence import LONG, Divergence, ExpertBalance
from lingvo_gshard.training.run.monitoring.metrics import (
    METRICS_FILE,
    MetricsRow,
    MetricsWriter,
    NoWriter,
    Pictures,
    first_and_last,
)
from lingvo_gshard.training.run.monitoring.progress import StepDisplay, Waiting
from lingvo_gshard.training.run.monitoring.trackers import open_trackers

_MOST_LINES = 20


class SpikeLog:
    """Tells of spikes from the metrics of `Spikes`."""

    def __init__(self, policy: str):
        """Makes the log of one run.

        Args:
          policy: `step.spikes.policy`.
        """
        self._end = "it was trained on" if policy == "warn" else "its update was discarded"
        self._lines = 0
        self._last: MetricsRow = {}

    def add(self, step: int, row: MetricsRow) -> str:
        """Adds the metrics of a step. Returns a line to show if it is a spike, else ''."""
        self._last = row
        # A mean over workers is positive if the step of any of them is a spike.
        if not row.get("spike"):
            return ""
        self._lines += 1
        if self._lines > _MOST_LINES:
            return ""
        return (
            f"Warning: step {step:,} is a spike, and {self._end}: loss {row['loss']:.4g} is "
            f"{row['loss_deviations']:.1f} deviations above its running mean, gradient norm "
            f"{row['gradient_norm']:.4g} is {row['gradient_norm_deviations']:.1f}"
        )

    def summary(self) -> list[str]:
        """Returns a line with the number of spikes of the run, if there were any."""
        count = self._last.get("spikes", 0.0)
        if not count:
            return []
        return [f"spikes: {count:,.0f} since the first step of the run (metrics.jsonl has each)"]


_SHOWN_OF_DEV = ("loss", "perplexity", "accuracy")


class RunLog:
    """Shows progress and writes metrics while it is used as a context manager.

    In a cluster only the main process shows and writes.
    """

    def __init__(
        self,
        console: rich.console.Console,
        logdir: Logdir,
        params: Params,
        step: int,
        guessing_loss: float | None = None,
        compilations: CompilationWatch | None = None,
    ):
        """Makes the log of one run.

        Args:
          console: where progress is shown.
          logdir: where metrics are written.
          params: the experiment's Params.
          step: the step that the run resumes from.
          guessing_loss: as in `Divergence`.
          compilations: explains the run's compilations; without it, no batch is declared.
        """
        self._console = console if processes.is_main() else rich.console.Console(quiet=True)
        self._logdir = logdir
        self._params, self._options = params, params.run
        self._step = step
        self._guessing_loss = guessing_loss
        self._balance = ExpertBalance()
        self._spikes = SpikeLog(params.step.spikes.policy)
        self._compilations = compilations or CompilationWatch(list)

    def __enter__(self) -> RunLog:
        self._display = StepDisplay(
            self._console,
            self._step,
            self._options.steps,
            self._options.log_every_steps,
            self._balance.digest,
        )
        self._display.__enter__()
        self._go_on_after(self._step)
        chosen = self._options.writers if processes.is_main() else ()
        given = self._logdir.params_as_text()
        self._trackers = open_trackers(chosen, self._logdir.path, given, self.say)
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.close()
        self._trackers.close(is_finished=error[0] is None)
        self._display.__exit__(*error)

    def _go_on_after(self, step: int) -> None:
        """Opens the files to write the rows after a step; removes the rows of later steps."""
        self._divergence = Divergence(self._params.step, self._guessing_loss)
        if step:
            earlier = first_and_last(self._logdir.path / METRICS_FILE, step, LONG)
            self._divergence.resume(earlier)
        is_main = processes.is_main()
        self._writer = MetricsWriter(self._logdir.path, step, self.say) if is_main else NoWriter()

    def roll_back(self, step: int) -> None:
        """Removes the rows after a step that the run goes back to."""
        self._writer.close()
        self._display.pause()
        self._go_on_after(step)

    def compiling(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context for the compilation of the first step, which may take minutes."""
        if self._console.is_terminal:
            # The progress bar says so.
            return contextlib.nullcontext()
        self.say("compiling")
        return Waiting("compiling", self.say)

    def working(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Returns a context for other work than steps, which is then shown; see `StepDisplay`."""
        return self._display.working(what)

    @property
    def diverged_since(self) -> int | None:
        """The step that showed the divergence of the loss; see `Divergence.since`."""
        return self._divergence.since

    def say(self, text: str) -> None:
        """Shows a line, above the progress bar if there is one."""
        self._display.say(text)

    def is_logged(self, step: int) -> bool:
        """Returns whether the step gets a log line and a point on each curve."""
        return step % self._options.log_every_steps == 0 or step == self._options.steps

    def add_step(self, step: int, row: MetricsRow) -> None:
        """Shows the metrics of a training step, and adds derived ones to `row`."""
        if "cross_entropy" in row:
            row["perplexity"] = perplexity(row["cross_entropy"])
        self._display.count(row.get("tokens", 0.0))
        if self._display.tokens_per_second:
            row["tokens_per_second"] = self._display.tokens_per_second
        self._balance.add(row)
        self._display.update(step, row)
        for warning in (self._spikes.add(step, row), self._divergence.add(step, row)):
            if warning:
                self.say(warning)
        if self.is_logged(step):
            self._balance.end_interval()

    def add_compilations(self, step: int, compilations: Sequence[Compilation]) -> None:
        """Shows and writes what was compiled since the last call.

        Args:
          step: the step that was compiled for.
          compilations: all compilations of the run so far.
        """
        for compilation in self._compilations.new(compilations):
            if compilation.function == "train":
                self.say(f"step {step:,}  {compilation.words()}")
            warning = self._compilations.add(step, compilation)
            if warning:
                self.say(warning)
            if processes.is_main():
                append_compilation(self._logdir.path, step, compilation, self.say)

    def show_dev(self, step: int, row: MetricsRow) -> None:
        """Shows the metrics of the dev split."""
        parts = [
            f"{name} {row[f'dev/{name}']:.4f}" for name in _SHOWN_OF_DEV if f"dev/{name}" in row
        ]
        self.say(f"step {step:,}  dev: {'  '.join(parts)}")

    def pause(self) -> None:
        """Excludes the time until the next step from the throughput."""
        self._display.pause()

    def lacks_evaluation(self, step: int) -> bool:
        """Returns whether the step that the run resumes from has a row without dev metrics."""
        row = self._writer.resumed_row(step)
        return row is not None and not any(name.startswith("dev/") for name in row)

    def add_evaluation(self, step: int, dev: MetricsRow) -> None:
        """Adds dev metrics to the row of the step that the run resumes from."""
        row = self._writer.resumed_row(step)
        if dev and row is not None:
            self._writer.amend_resumed_row(step, {**row, **dev})
            self._writer.curves(step, dev)
            self._trackers.write(step, dev)

    def flush(self) -> None:
        """Writes metrics that waited for space on the disk, if there is some now."""
        self._writer.flush()

    def write(self, step: int, row: MetricsRow, is_point: bool) -> None:
        """Writes the metrics of a step.

        Args:
          step: number of the step, from 1.
          row: name -> value.
          is_point: whether to add a point to each TensorBoard curve as well.
        """
        self._writer.write(step, row)
        self._trackers.write(step, row)
        if is_point:
            self._writer.curves(step, row)
            self._trackers.flush()

    def add_curves(self, step: int, row: MetricsRow) -> None:
        """Adds a point to TensorBoard curves that metrics.jsonl does not have."""
        self._writer.curves(step, row)

    def add_pictures(self, step: int, found: Pictures) -> None:
        """Adds pictures to TensorBoard."""
        self._writer.pictures(step, found)

    def show_summary(self, lines: Sequence[str] = ()) -> None:
        """Shows compilations, spikes, the balance of any experts, and whether the loss diverged.

        Args:
          lines: further lines about spikes.
        """
        self._say_all([*self._compilations.summary(), *self._spikes.summary(), *lines])
        self._say_all(self._balance.summary() + self._divergence.summary())

    def _say_all(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)
