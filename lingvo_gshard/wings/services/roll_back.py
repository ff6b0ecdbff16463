"""Roll backs: a run returns to a checkpoint before its spikes and skips batches around them.

After a roll back the run continues from `step.spikes.roll_back_steps` steps before the first
spike, and goes on past `step.spikes.skipped_batches` batches. The state of that step is computed
again from the newest checkpoint before it. The run therefore equals a run whose input never had
these batches, wherever its checkpoints were.

A roll back first deletes the checkpoints after that step, then writes its row to roll_backs.jsonl,
and then restores. A run that is killed in between repeats the spikes and the roll back, or finds
the row. Both give the same run.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from lingvo_gshard.core import Params, atomic, explained, objects, processes, signals
from lingvo_gshard.data import Batch, TrainBatches
from lingvo_gshard.training import Checkpoint, MetricsRow, ObservedRun, RollBackError, StepObserver
from lingvo_gshard.wings.optimizers.spikes import ROLL_BACK


@dataclasses.dataclass(frozen=True)
class SkippedBatches:
    """Ranges (first, last) of batches, counted from 1, that are skipped. They may overlap."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self.ranges)

    def plus(self, first: int, last: int) -> SkippedBatches:
        """Returns these batches and one more range."""
        return SkippedBatches((*self.ranges, (first, last)))

    def batch_of_step(self, step: int) -> int:
        """Returns the number of the batch that a step trains on; 0 for step 0."""
        number = step
        for first, last in _merged(self.ranges):
            if step == 0 or number < first:
                break
            number += last - first + 1
        return number


class BatchesWithoutSkipped:
    """The training batches of an input, without those that are skipped.

    The position counts skipped batches, too. A saved position therefore stays valid when more
    batches are skipped.
    """

    def __init__(self, batches: TrainBatches, skipped: SkippedBatches):
        """Takes over an input's batches, at their beginning, to leave out the skipped ones."""
        self._batches = batches
        self._skipped = skipped
        self._number = 0

    def __next__(self) -> Batch:
        while self._number + 1 in self._skipped:
            next(self._batches)
            self._number += 1
        batch = next(self._batches)
        self._number += 1
        return batch

    def get_state(self) -> Any:
        """Returns the input's position after the last batch."""
        return self._batches.get_state()

    def set_state(self, state: Any) -> None:
        """Moves the input to a saved position; see `go_on_after`."""
        self._batches.set_state(state)

    def go_on_after(self, step: int, skipped: SkippedBatches) -> None:
        """Counts from the batch of a step, whose position was set, without `skipped` ones."""
        self._skipped = skipped
        self._number = skipped.batch_of_step(step)

    def close(self) -> None:
        """Stops background work of the input."""
        self._batches.close()


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the same numbers as ranges in order that do not overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged


# Name of the file in the run's directory.
ROLL_BACKS_FILE = "roll_backs.jsonl"


class RollBack(msgspec.Struct, frozen=True):
    """One roll back, a row of roll_backs.jsonl.

    Attributes:
      step: the last of the spikes in a row.
      last_step: the last step before them that the run keeps.
      checkpoint: the newest checkpoint up to that step.
      first_batch: the first batch that is skipped, counted from 1.
      metrics: loss, gradient norm and their deviations in `step`.
    """

    step: int
    first_spike: int
    last_step: int
    checkpoint: int
    first_batch: int
    last_batch: int
    metrics: dict[str, float]

    def words(self) -> str:
        """Returns what happened, for the user."""
        count = self.step - self.first_spike + 1
        which = f"step {self.step:,} is a spike"
        if count > 1:
            which = f"steps {self.first_spike:,} to {self.step:,} are spikes"
        return (
            f"Warning: {which}: loss {self.metrics['loss']:.4g}, gradient norm "
            f"{self.metrics['gradient_norm']:.4g}. Rolling back to step {self.last_step:,}, from "
            f"the checkpoint of step {self.checkpoint:,}, and skipping batches "
            f"{self.first_batch:,} to {self.last_batch:,}"
        )


_DECODER = msgspec.json.Decoder(RollBack)


class RollBackLimitError(signals.TrainingFailedError):
    """Spikes came back after as many roll backs as are allowed."""


class RollBacks:
    """The roll backs of one run, in order. In a cluster, all processes make the same calls."""

    def __init__(self, params: Params, logdir: pathlib.Path, step: int):
        """Reads the roll backs of a run. Raises UserError if roll_backs.jsonl is damaged.

        `step` is the step that the run resumes from. A run that begins loses earlier roll backs.
        """
        self._p = params
        self._path = logdir / ROLL_BACKS_FILE
        rows = processes.together(lambda: _read(self._path, step) if processes.is_main() else None)
        self.rows = [msgspec.convert(row, RollBack) for row in processes.from_main(rows)]

    @property
    def skipped(self) -> SkippedBatches:
        """The batches that no step trains on."""
        return SkippedBatches(tuple((row.first_batch, row.last_batch) for row in self.rows))

    def is_due(self, row: MetricsRow) -> bool:
        """Returns whether a step's metrics ask for a roll back."""
        # A mean over workers is positive if one of them asks.
        return row.get(ROLL_BACK, 0.0) > 0

    def plan(self, step: int, row: MetricsRow, checkpoints: Sequence[int]) -> RollBack | None:
        """Returns the roll back for the spikes up to a step; None if no checkpoint is older.

        `checkpoints` are the steps with a complete one, ascending. Raises RollBackLimitError after
        as many roll backs as are allowed.
        """
        p = self._p
        first_spike = max(1, step - p.most_in_a_row + 1)
        older = [one for one in checkpoints if one < first_spike]
        if not older:
            return None
        last_step = max(first_spike - 1 - p.roll_back_steps, older[0])
        if len(self.rows) >= p.most_roll_backs:
            raise RollBackLimitError(self._limit_words(step, row, older[-1]))
        skipped = self.skipped
        return RollBack(
            step=step,
            first_spike=first_spike,
            last_step=last_step,
            checkpoint=max(one for one in older if one <= last_step),
            first_batch=skipped.batch_of_step(last_step) + 1,
            last_batch=skipped.batch_of_step(max(step, last_step + p.skipped_batches)),
            metrics={k: v for k, v in row.items() if k.startswith(("loss", "gradient_norm"))},
        )

    def add(self, row: RollBack) -> None:
        """Records a roll back. Raises OSError or SharedError if the file cannot be written."""
        self.rows.append(row)
        content = b"".join(msgspec.json.encode(row) + b"\n" for row in self.rows)
        is_main = processes.is_main()
        processes.together(lambda: atomic.replace_file(self._path, content) if is_main else None)

    def summary(self) -> list[str]:
        """Returns a line with the number of roll backs of the run, if there were any."""
        count = len(self.rows)
        return [f"roll backs: {count:,} ({ROLL_BACKS_FILE} has each)"] if count else []

    def _limit_words(self, step: int, row: MetricsRow, checkpoint: int) -> str:
        count = len(self.rows)
        times = f"{count:,} roll back" + "s" * (count > 1)
        return (
            f"step {step:,}: spikes again after {times} (loss {row['loss']:.4g}, gradient norm "
            f"{row['gradient_norm']:.4g}), and step.spikes.most_roll_backs is "
            f"{self._p.most_roll_backs:,}. The newest checkpoint before them is step "
            f"{checkpoint:,}. Start again with a lower step.schedule.learning_rate, or raise "
            "the limit to go on"
        )


class RollBackWatch(StepObserver):
    """Takes a run back where the metrics of a step ask for it."""

    def __init__(self, run: ObservedRun):
        """Reads the roll backs of a run. Raises UserError if their file is damaged."""
        self._run = run
        resumed = run.first_step - 1
        self._roll_backs = RollBacks(run.trainer.p.spikes, run.logdir.path, resumed)
        self._batches: BatchesWithoutSkipped | None = None

    def wrap_batches(self, batches: TrainBatches) -> TrainBatches:
        """Leaves out skipped batches."""
        self._batches = BatchesWithoutSkipped(batches, self._roll_backs.skipped)
        return self._batches

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Goes on counting batches after the checkpoint."""
        if checkpoint is not None and self._batches is not None:
            self._batches.go_on_after(checkpoint.step, self._roll_backs.skipped)

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Goes back if a step asks for it, and there is where to go.

        Raises:
          RollBackError: the run goes on from an older checkpoint.
          RollBackLimitError: spikes came back after as many roll backs as are allowed.
        """
        if not self._roll_backs.is_due(row):
            return
        run = self._run
        run.store.finish()
        found = self._roll_backs.plan(step, row, run.store.steps)
        if found is None:
            run.say(
                f"Warning: step {step:,}: no checkpoint is older than the spikes, so there is "
                "nothing to go back to"
            )
            return
        run.announce("rolls back")
        run.say(found.words())
        run.delete_after(found.last_step)
        self._roll_backs.add(found)
        run.logdir.push()
        raise RollBackError

    def summary(self) -> list[str]:
        """Returns a line with the number of roll backs, if there were any."""
        return self._roll_backs.summary()


def count_roll_backs(logdir: pathlib.Path) -> int:
    """Returns how often the run in a directory went back."""
    try:
        return len(objects.read_bytes(logdir / ROLL_BACKS_FILE).splitlines())
    except FileNotFoundError:
        return 0


def _read(path: pathlib.Path, step: int) -> list[dict]:
    """Returns the rows of the file as JSON values; removes the file if the run begins."""
    if not path.exists():
        return []
    if not step:
        path.unlink()
        return []
    rows = []
    for number, line in enumerate(objects.read_bytes(path).splitlines(), 1):
        with explained(f"{path}:{number} is damaged", msgspec.DecodeError, UnicodeDecodeError):
            rows.append(msgspec.to_builtins(_DECODER.decode(line)))
    return rows
