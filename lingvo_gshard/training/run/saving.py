"""Saving: the checkpoints of a run."""

from __future__ import annotations

from lingvo_gshard.training.run.monitoring.metrics import MetricsRow
from lingvo_gshard.training.run.monitoring.step_observer import ObservedRun, StepObserver


class Saving(StepObserver):
    """Saves every `run.checkpoint_every_steps` steps, after the last, and when asked to."""

    def __init__(self, run: ObservedRun):
        """Takes the run, whose store gets the checkpoints."""
        self._run, self._store = run, run.store
        self.every = run.params.run.checkpoint_every_steps

    def record(self, step: int, row: MetricsRow) -> None:
        """Reports a save that has failed."""
        if self._run.is_shown(step):
            self._store.poll()

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is saved after a step. `finish` saves the last one."""
        is_due = super().is_due(step) or self._run.is_save_wanted
        return is_due and step < self._run.params.run.steps

    def at_period(self, step: int, row: MetricsRow) -> None:
        """Saves a checkpoint."""
        self._save()

    def finish(self) -> None:
        """Saves the last checkpoint, if it is not saved yet; tells the time that saves took."""
        if self._run.step > self._run.saved_step:
            self._save()
        for line in self._run.saving_time.words():
            self._run.say(line)

    def wait(self) -> None:
        """Waits for the last save. Raises OSError if it failed."""
        step = self._run.step
        is_saved = self._store.finish()
        newest = max(self._store.steps, default=0)
        if not is_saved or newest != step:
            raise OSError(
                f"step {step:,} could not be saved. {self._store.advice}; the same command then "
                f"resumes from step {newest:,}"
            )

    def _save(self) -> None:
        run = self._run
        run.announce("saves a checkpoint", run.params.run.save_seconds)
        run.check_directory(run.logdir.check_lock)
        # A checkpoint whose steps lack rows would leave a gap in the metrics of a resumed run.
        run.writer.flush()
        position, text = run.batches.get_state(), run.params.to_text()
        with run.saving_time.measured("checkpoints"):
            self._store.save(
                run.step,
                run.runtime.state(),
                position,
                text,
                run.input_.save_vocabularies,
                run.best,
            )
        run.saved_step, run.is_save_wanted = run.step, False
