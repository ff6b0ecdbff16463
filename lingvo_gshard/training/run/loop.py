"""The training loop: feeds batches to a runtime, and tells observers about each step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core.progress import SILENT, Progress
from lingvo_gshard.core.signals import TrainingFailedError
from lingvo_gshard.data.input import Batch
from lingvo_gshard.training.run.checkpoint.run_item import Checkpoint
from lingvo_gshard.training.run.checkpoint.trainer_state import restored_state
from lingvo_gshard.training.run.monitoring.metrics_log import MetricsLog
from lingvo_gshard.training.run.monitoring.step_observer import (
    COMPILING,
    OBSERVERS,
    ObservedRun,
    RollBackError,
    StepObserver,
    StepObservers,
)
from lingvo_gshard.training.run.runtime_protocol import Metrics
from lingvo_gshard.training.run.saving import Saving


@dataclasses.dataclass
class Outcome:
    """The end of a run.

    Attributes:
      step: number of steps taken, including steps before the run resumed.
      finished: whether the run has taken all its steps.
      signal: why the run ended early, one of `EXIT_CODES`, such as "Ctrl-C"; None if it did not.
      metrics: metrics of the last step that this call took; empty if it took none.
      diverged_since: the step that showed the divergence of the loss (`Divergence.since`); None if
        the loss has not diverged, or has recovered.
    """

    step: int
    finished: bool
    signal: str | None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    diverged_since: int | None = None


class TrainingLoop:
    """Trains to `run.steps` in a log directory that was claimed for the run's Params.

    The loop reads a step's metrics after it has started the next step, so that the device does not
    wait for the host. In a cluster each process has a loop; all stop at the same step.
    """

    def __init__(self, run: ObservedRun, observers: Sequence[StepObserver] = ()):
        """Makes the loop of one run.

        Args:
          run: the run. Its runtime has no state yet.
          observers: are told of each step, before the services of all runs.

        Raises:
          UserError: the dev split cannot be read, or has no examples.
        """
        self._run, self._runtime = run, run.runtime
        self._saving = Saving(run)
        services = filter(None, [make(run) for make in OBSERVERS])
        self._observers = StepObservers([MetricsLog(run), *observers, *services, self._saving])
        run.observers = self._observers
        # The step whose metrics have not been read.
        self._pending: _Pending | None = None
        self._is_first = True

    def run(self, checkpoint: Checkpoint | None = None, progress: Progress = SILENT) -> Outcome:
        """Trains from a checkpoint, or from the initial weights if there is none.

        Args:
          progress: is told the stages before the first step; closed there.

        Raises:
          TrainingFailedError: a loss or gradient is not finite, or a service ends the run.
          OSError: the last checkpoint could not be saved. Older checkpoints remain.
        """
        run = self._run
        with contextlib.ExitStack() as stack:
            batches = run.input_.train_batches(run.trainer.p.seed)
            run.batches = self._observers.wrap_batches(batches)
            stack.callback(run.batches.close)
            progress.begin("Initializing the weights" if checkpoint is None else "Loading")
            self._load(checkpoint)
            progress.close()
            stack.callback(self._observers.at_end)
            self._observers.go_on(checkpoint)
            self._observers.begin()
            while not self._take_steps():
                self._go_back()
            self._observers.finish()
            for line in self._observers.summary():
                run.say(line)
            self._saving.wait()
        is_finished = run.step >= run.params.run.steps or run.is_over
        return Outcome(run.step, is_finished, run.stop.agreed, run.row, run.diverged_since)

    def _load(self, checkpoint: Checkpoint | None) -> None:
        """Restores the state and the input's position, or initializes them."""
        run = self._run
        run.step = checkpoint.step if checkpoint else 0
        # A snapshot in memory may be newer than the newest checkpoint.
        run.saved_step = min(run.step, max(run.store.steps, default=0))
        if checkpoint is None:
            self._runtime.init_state()
            return
        abstract_state = self._runtime.abstract_state()
        self._runtime.load_state(restored_state(run.trainer, checkpoint, abstract_state))
        if checkpoint.position is not None:
            # A model that was imported begins with the first batch.
            run.batches.set_state(checkpoint.position)
        # The runtime has its own copy. Two may not fit into memory.
        checkpoint.arrays.clear()

    def _take_steps(self) -> bool:
        """Takes all steps. Returns False if an observer asked to go back to a checkpoint."""
        run = self._run
        try:
            while run.step < run.params.run.steps and not run.is_over and not run.stop.agreed:
                self._start_step(self._next_batch())
                if self._observers.is_due(run.step):
                    self._finish_step()
            self._finish_step()
        except RollBackError:
            return False
        return True

    def _go_back(self) -> None:
        """Restores the newest checkpoint. The step in progress is dropped."""
        self._pending = None
        checkpoint = self._run.store.restore(self._runtime.abstract_state())
        assert checkpoint is not None
        self._load(checkpoint)
        self._observers.go_on(checkpoint)

    def _next_batch(self) -> Batch:
        """Waits for the next step's batch."""
        step = self._run.step + 1
        if self._observers.needs_idle(step):
            self._finish_step()
            self._observers.before_other_work("waits for its observers")
            self._observers.while_idle(step)
        self._observers.before_input(step)
        batch = next(self._run.batches)
        self._observers.before_step(step, batch)
        return batch

    def _start_step(self, batch: Batch) -> None:
        """Starts a step and then finishes the one before."""
        run, step = self._run, self._run.step + 1
        # Announced first: the answer is known as soon as all work started earlier is done.
        run.stop.announce()
        with self._observers.working(COMPILING) if self._is_first else contextlib.nullcontext():
            metrics = self._runtime.train_step(batch)
        self._is_first = False
        # Before the first step is compiled and started, there is nothing to save.
        run.stop.finishing = True
        self._finish_step(is_last=False)
        run.step = step
        self._pending = _Pending(step, metrics, batch)
        run.check_directory()
        self._observers.after_start(step)
        for message in self._runtime.pop_messages():
            run.say(message)

    def _finish_step(self, is_last: bool = True) -> None:
        """Waits for the pending step, if there is one, and tells observers its metrics.

        Args:
          is_last: whether no later step has started.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        step = pending.step
        self._observers.before_result(step)
        row = self._run.trainer.shown_metrics(step, pending.metrics.read())
        self._run.check_directory()
        if self._run.trainer.should_stop(row):
            self._observers.before_other_work("looks for the cause of a step that is not finite")
            self._observers.on_divergence(step, row, pending.batch)
            raise TrainingFailedError(
                f"step {step:,}: loss {row['loss']}, gradient norm {row['gradient_norm']}"
            )
        self._observers.after_step(step, row)
        self._observers.record(step, row)
        self._run.row = row
        if is_last:
            self._observers.at_period(step, row)


@dataclasses.dataclass
class _Pending:
    """A step whose metrics have not been read.

    Attributes:
      step: number of the step, from 1.
      metrics: the step's metrics, which may still be computed.
      batch: the step's batch, for a diagnosis.
    """

    step: int
    metrics: Metrics
    batch: Batch
