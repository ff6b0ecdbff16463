"""DevEvaluation: evaluates the dev split while a run trains, and keeps the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from lingvo_gshard.core import UserError, nearest, processes
from lingvo_gshard.data import Batch
from lingvo_gshard.tasks import WeightedMeans, perplexity
from lingvo_gshard.training import Best, Checkpoint, MetricsRow, ObservedRun, StepObserver
from lingvo_gshard.wings.services.run_options import DEV

_SHOWN = ("loss", "perplexity", "accuracy")


def ends_training(patience: int, best: Best | None) -> bool:
    """Returns whether training ends early, by its patience and its best evaluation."""
    return best is not None and 0 < patience <= best.evaluations_since


class DevEvaluation(StepObserver):
    """Evaluates every `run.evaluate_every_steps` steps, and after the last."""

    def __init__(self, run: ObservedRun):
        """Reads and tokenizes the dev split now, so that a UserError in it costs no training."""
        self._run, self._input = run, run.input_
        self.every = run.params.run.evaluate_every_steps
        self._metric, self._patience = run.params.run.keep_best, run.params.run.patience
        self._has_compiled = False
        if self._metric and "dev" not in self._input.splits:
            raise UserError(
                f"run.keep_best={self._metric!r}: the data has no dev split. Give it one, or set "
                "run.keep_best='', which keeps the last checkpoints alone"
            )
        # No row may be held out of the training files, which is known when these are read.
        self._input.check_split("train")
        if "dev" not in self._input.splits:
            return
        self._input.check_split("dev")
        if next(iter(self._input.evaluation_batches("dev")), None) is None:
            raise UserError("the dev split has no examples: none of its rows fits a batch")

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Takes over the best evaluation of a checkpoint; the best of another metric is dropped."""
        best = checkpoint.record.best if checkpoint else None
        self._run.best = best if best and best.metric == self._metric else None
        self._end_in_time()

    def begin(self) -> None:
        """Evaluates the step that the run resumes from if a signal cut its evaluation short.

        Raises:
          UserError: no metric of the dev split is called `run.keep_best`.
        """
        run, step = self._run, self._run.step
        if self._metric:
            batch = next(iter(self._input.evaluation_batches("dev")))
            names = self._dev_row([batch])
            if names and self._metric not in names:
                raise UserError(
                    f"run.keep_best={self._metric!r} is no metric of the dev split. "
                    f"{nearest(self._metric, names)}"
                )
        if not step or not StepObserver.is_due(self, step) or "dev" not in self._input.splits:
            return
        row = run.writer.resumed_row(step)
        if processes.from_main(row is not None and not any(n.startswith(DEV) for n in row)):
            dev = self._evaluate(step)
            run.observers.add_evaluation(step, dev)
            self._is_best(step, dev)
            self._end_in_time()

    def is_due(self, step: int) -> bool:
        """Returns whether a step is evaluated."""
        return super().is_due(step) or step == self._run.params.run.steps

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Adds the metrics of the dev split."""
        if self.is_due(step):
            row.update(self._evaluate(step))

    def at_period(self, step: int, row: MetricsRow) -> None:
        """Asks for a checkpoint of the best evaluation, and for an end of the run in time."""
        if self._is_best(step, row):
            self._run.save()
        self._end_in_time()

    def finish(self) -> None:
        """Tells the best evaluation, and that it ends the training if it does."""
        best = self._run.best
        if best:
            self._run.say(f"The best {best.metric} is {best.value:.4f}, of step {best.step:,}")
        if best and ends_training(self._patience, best):
            self._run.say(
                f"Training ends: {best.evaluations_since:,} evaluations since were not better "
                f"(run.patience = {self._patience})"
            )

    def _is_best(self, step: int, row: MetricsRow) -> bool:
        """Notes an evaluation and returns whether it is the best; a row without it is ignored."""
        if not self._metric or self._metric not in row:
            return False
        best, value = self._run.best, row[self._metric]
        self._run.best = best.after(step, value) if best else Best(self._metric, value, step)
        return self._run.best.step == step

    def _end_in_time(self) -> None:
        if ends_training(self._patience, self._run.best):
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
