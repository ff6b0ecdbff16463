"""MetricsLog: writes the metrics of each step to the run's directory."""

from __future__ import annotations

from lingvo_gshard.core import processes
from lingvo_gshard.tasks.evaluation import perplexity
from lingvo_gshard.training.run.checkpoint.run_item import Checkpoint
from lingvo_gshard.training.run.monitoring.metrics import MetricsRow, MetricsWriter
from lingvo_gshard.training.run.monitoring.step_observer import ObservedRun, StepObserver


class MetricsLog(StepObserver):
    """Writes a row for each step, and points of curves. In a cluster the main process writes."""

    def __init__(self, run: ObservedRun):
        """Takes the run, whose `writer` it opens."""
        self._run = run

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Opens the files to write the rows after a step; removes the rows of later steps."""
        run = self._run
        run.writer.close()
        if processes.is_main():
            run.writer = MetricsWriter(run.logdir.path, run.step, run.say)

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Adds the perplexity."""
        if "cross_entropy" in row:
            row["perplexity"] = perplexity(row["cross_entropy"])

    def record(self, step: int, row: MetricsRow) -> None:
        """Writes the row of a step."""
        self._run.writer.write(step, row)
        if self._run.is_shown(step):
            self._run.writer.curves(step, row)

    def add_evaluation(self, step: int, dev: MetricsRow) -> None:
        """Adds dev metrics to the row of the step that the run resumes from."""
        writer = self._run.writer
        row = writer.resumed_row(step)
        if dev and row is not None:
            writer.amend_resumed_row(step, {**row, **dev})
            writer.curves(step, dev)

    def at_end(self) -> None:
        """Closes the files."""
        self._run.writer.close()
