"""DevEvaluation: evaluates the dev split while a run trains, and keeps the best checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lingvo_gshard.core import Params, UserError, processes
from lingvo_gshard.core.config.names import nearest
from lingvo_gshard.data import Batch
from lingvo_gshard.tasks import WeightedMeans, perplexity
from lingvo_gshard.training import Checkpoint, MetricsRow, ObservedRun, StepObserver
from lingvo_gshard.training.run.checkpoint.run_item import Best
from lingvo_gshard.wings.services.run_options import DEV

_SHOWN = ("loss", "perplexity", "accuracy")


class KeepBest:
    """Keeps track of the best evaluation while a run trains.

    Attributes:
      best: the best evaluation so far; None before the first, and if none is looked for.
    """

    def __init__(self, p: Params):
        """Makes it for the options of a run."""
        self._metric, self._patience = p.keep_best, p.patience
        self.best: Best | None = None

    def load(self, checkpoint: Checkpoint | None) -> None:
        """Goes on from a checkpoint. The best of another metric is forgotten."""
        best = checkpoint.record.best if checkpoint else None
        self.best = best if best and best.metric == self._metric else None

    def check_splits(self, splits: Collection[str]) -> None:
        """Raises UserError if the run keeps the best checkpoint and the data has no dev split."""
        if self._metric and "dev" not in splits:
            raise UserError(
                f"run.keep_best={self._metric!r}: the data has no dev split. Give it one, or set "
                "run.keep_best='', which keeps the last checkpoints alone"
            )

    def check_metrics(self, names: Collection[str]) -> None:
        """Raises UserError if no metric of the dev split has the name of `run.keep_best`.

        Args:
          names: names of all metrics of an evaluation, with their prefix; none if it was cut
            short.
        """
        if names and self._metric not in names:
            raise UserError(
                f"run.keep_best={self._metric!r} is no metric of the dev split. "
                f"{nearest(self._metric, names)}"
            )

    def add(self, step: int, row: MetricsRow) -> bool:
        """Returns whether an evaluation is the best so far.

        Args:
          step: the step that was evaluated.
          row: the step's metrics. A row without the metric of `run.keep_best` is ignored.
        """
        if not self._metric or self._metric not in row:
            return False
        value = row[self._metric]
        self.best = self.best.after(step, value) if self.best else Best(self._metric, value, step)
        return self.best.step == step

    @property
    def ends_training(self) -> bool:
        """Whether there were as many evaluations without a better one as `patience` allows."""
        return ends_training(self._patience, self.best)

    def words(self) -> list[str]:
        """Returns a line about the best evaluation, and one if it ends the training."""
        best = self.best
        if not best:
            return []
        lines = [f"The best {best.metric} is {best.value:.4f}, of step {best.step:,}"]
        if self.ends_training:
            lines.append(
                f"Training ends: {best.evaluations_since:,} evaluations since were not better "
                f"(run.patience = {self._patience})"
            )
        return lines


def ends_training(patience: int, best: Best | None) -> bool:
    """Returns whether training ends early, by its patience and its best evaluation."""
    return best is not None and 0 < patience <= best.evaluations_since


class DevEvaluation(StepObserver):
    """Evaluates every `run.evaluate_every_steps` steps, and after the last."""

    def __init__(self, run: ObservedRun):
        """Reads and tokenizes the dev split, so that errors in it cost no training.

        Raises:
          UserError: the dev split cannot be read, or has no examples.
        """
        self._run, self._input = run, run.input_
        self.every = run.params.run.evaluate_every_steps
        self._keep_best = KeepBest(run.params.run)
        self._has_compiled = False
        self._keep_best.check_splits(self._input.splits)
        # No row may be held out of the training files, which is known when these are read.
        self._input.check_split("train")
        if "dev" not in self._input.splits:
            return
        self._input.check_split("dev")
        if next(iter(self._input.evaluation_batches("dev")), None) is None:
            raise UserError("the dev split has no examples: none of its rows fits a batch")

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Takes over the best evaluation of a checkpoint."""
        self._keep_best.load(checkpoint)
        self._note_best()

    def begin(self) -> None:
        """Evaluates the step that the run resumes from if a signal cut its evaluation short.

        Raises:
          UserError: no metric of the dev split is called `run.keep_best`.
        """
        run, step = self._run, self._run.step
        if run.params.run.keep_best:
            batch = next(iter(self._input.evaluation_batches("dev")))
            self._keep_best.check_metrics(self._dev_row([batch]))
        if not step or not StepObserver.is_due(self, step) or "dev" not in self._input.splits:
            return
        row = run.writer.resumed_row(step)
        if processes.from_main(row is not None and not any(n.startswith(DEV) for n in row)):
            dev = self._evaluate(step)
            run.observers.add_evaluation(step, dev)
            self._keep_best.add(step, dev)
            self._note_best()

    def is_due(self, step: int) -> bool:
        """Returns whether a step is evaluated."""
        return super().is_due(step) or step == self._run.params.run.steps

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Adds the metrics of the dev split."""
        if self.is_due(step):
            row.update(self._evaluate(step))

    def at_period(self, step: int, row: MetricsRow) -> None:
        """Asks for a checkpoint of the best evaluation, and for an end of the run in time."""
        if self._keep_best.add(step, row):
            self._run.save()
        self._note_best()

    def finish(self) -> None:
        """Tells the best evaluation."""
        for line in self._keep_best.words():
            self._run.say(line)

    def _note_best(self) -> None:
        self._run.best = self._keep_best.best
        if self._keep_best.ends_training:
            self._run.end_training()

    def _evaluate(self, step: int) -> MetricsRow:
        """Returns the metrics of the dev split; none if there is no such split or on a stop."""
        if "dev" not in self._input.splits:
            return {}
        self._run.announce("evaluates")
        row = self._dev_row(self._input.evaluation_batches("dev"))
        if row:
            parts = [f"{name} {row[DEV + name]:.4f}" for name in _SHOWN if DEV + name in row]
            self._run.say(f"step {step:,}  dev: {'  '.join(parts)}")
        return row

    def _dev_row(self, batches: Iterable[Batch]) -> MetricsRow:
        """Returns the metrics of batches of the dev split; none on a stop."""
        means, stop = WeightedMeans(), self._run.stop
        for number, batch in enumerate(batches, 1):
            stop.announce()
            if stop.agreed:
                return {}
            what = f"evaluating, batch {number:,}"
            with self._run.working(what if self._has_compiled else "compiling the evaluation"):
                means.add(self._run.runtime.eval_step(batch))
            self._has_compiled = True
        row = {f"{DEV}{name}": value for name, value in means.means().items()}
        if f"{DEV}cross_entropy" in row:
            row[f"{DEV}perplexity"] = perplexity(row[f"{DEV}cross_entropy"])
        return row
