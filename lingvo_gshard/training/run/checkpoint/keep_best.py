"""KeepBest: follows the dev metric of a run, to keep its best checkpoint and to stop early."""

from __future__ import annotations

from collections.abc import Collection

from lingvo_gshard.core.config.names import nearest
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.run.checkpoint.run_item import Best, Checkpoint
from lingvo_gshard.training.run.monitoring.metrics import Row


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
        """Raises ValueError if the data has no dev split, from which the metric would come."""
        if self._metric and "dev" not in splits:
            raise UserError(f"run.keep_best={self._metric!r}: the data has no dev split")

    def check_metrics(self, names: Collection[str]) -> None:
        """Raises ValueError if the metric is none of those of the dev split.

        Args:
          names: names of all metrics of an evaluation, with their prefix; none if it was cut
            short.
        """
        if names and self._metric not in names:
            raise UserError(
                f"run.keep_best={self._metric!r} is no metric of the dev split. "
                f"{nearest(self._metric, names)}"
            )

    def add(self, step: int, row: Row) -> bool:
        """Returns whether an evaluation is the best so far.

        Args:
          step: the step that was evaluated.
          row: its metrics; without those of the dev split if that was not evaluated.
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
