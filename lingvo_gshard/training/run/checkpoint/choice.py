"""The choice of the checkpoint to read: the best, the newest, or the one of a step."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Sequence

from lingvo_gshard.core.config.names import nearest
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.digits import whole_number
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.run.checkpoint.orbax_storage import steps_in
from lingvo_gshard.training.run.checkpoint.run_item import Best, Checkpoint, read_run
from lingvo_gshard.training.run.monitoring.metrics import MetricsRow

BEST, NEWEST = "best", "newest"


def check_choice(choice: str | int) -> None:
    """Raises ValueError if a choice is neither BEST nor NEWEST nor a step."""
    if choice not in (BEST, NEWEST) and whole_number(str(choice)) is None:
        raise UserError(
            f"`checkpoint={choice}`: expected {BEST}, {NEWEST} or the step of a checkpoint"
        )


def best_of(directory: pathlib.Path, steps: Sequence[int]) -> Best | None:
    """Returns the best evaluation by the newest readable checkpoint; None if it records none.

    Args:
      directory: the directory of the checkpoints.
      steps: their steps, ascending.
    """
    for step in reversed(steps):
        try:
            return read_run(directory / str(step)).record.best
        except Exception:  # Restoring it reports the damage.
            continue
    return None


def preferred(directory: pathlib.Path, choice: str | int) -> list[int]:
    """Returns the steps of a directory's checkpoints to try, as `in_order` has them."""
    return in_order(directory, steps_in(directory), choice)


def in_order(directory: pathlib.Path, steps: Sequence[int], choice: str | int) -> list[int]:
    """Returns the steps of the checkpoints to try, in this order.

    The best, if the run keeps it, comes before the newest, and each before older ones.

    Args:
      directory: the directory of the checkpoints.
      steps: their steps, ascending.
      choice: BEST, NEWEST, or a step, whose checkpoint is then the only one.

    Raises:
      UserError: there is no checkpoint of the step.
    """
    check_choice(choice)
    newest_first = [*reversed(steps)]
    if choice == NEWEST:
        return newest_first
    if choice == BEST:
        best = best_of(directory, steps)
        return sorted(newest_first, key=lambda step: not best or step != best.step)
    if int(choice) not in steps:
        there = ", ".join(str(step) for step in steps) or "none"
        raise UserError(f"`checkpoint={choice}`: {directory} has the checkpoints {there}")
    return [int(choice)]


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
