"""StepObserver: a service of a training run, which the training loop calls around each step.

Evaluation, checkpoints, progress, a watch for hangs, roll backs and a profiler are observers. A
service that takes part in every run registers a function at `OBSERVERS`. The loop calls observers
on its own thread, in every process of a cluster. First:

    wrap_batches, go_on, begin

then for each step:

    needs_idle, while_idle, before_input, before_step, after_start,
    before_result, after_step, record, at_period

and at last `finish`, `summary` and `at_end`. `before_other_work` announces evaluations, checkpoints
and roll backs. After a roll back the steps go on from a lower number.

The loop starts a step before it reads the metrics of the step before. `after_step(7)` therefore
usually follows `before_step(8)`. Where a period is due, and before a step that `needs_idle`, the
loop reads metrics at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console

from lingvo_gshard.core import Params, Seam
from lingvo_gshard.core.signals import StopRequest
from lingvo_gshard.data.input import Batch, Input, TrainBatches
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.run.checkpoint.run_item import Best, Checkpoint
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.logdir import Logdir, MovedError
from lingvo_gshard.training.run.monitoring.metrics import MetricsRow, MetricsWriter, NoWriter
from lingvo_gshard.training.run.monitoring.saving_time import SavingTime
from lingvo_gshard.training.run.runtime_protocol import Runtime
from lingvo_gshard.training.step.trainer import Trainer

# The work of the first step, for `StepObserver.working`.
COMPILING = "compiling"


class RollBackError(Exception):
    """Rolls a run back: an observer raises it, and the loop goes on from the newest checkpoint."""


@dataclasses.dataclass
class ObservedRun:
    """The run that an observer watches, and what the observer may ask for.

    Attributes:
      partitioning: the mesh and strategy; None on one device.
      stop: tells when a signal asks the run to end early.
      first_step: number of the first step of this call, from 1; larger in a run that resumes.
      console: where to print; silent in all processes but the main one.
      step: number of steps started.
      saved_step: the step of the newest checkpoint.
      writer: writes curves and pictures for TensorBoard, in the main process.
      row: the metrics of the last step that was finished.
      best: the best evaluation so far, if the run keeps it.
      saving_time: how long saves kept the steps waiting.
      is_over: whether no further step is taken, although `run.steps` allows it.
      is_save_wanted: whether a checkpoint is to be saved after the step.
      diverged_since: the step that showed the divergence of the loss; None without one.
    """

    params: Params
    trainer: Trainer
    runtime: Runtime
    partitioning: Partitioning | None
    input_: Input
    logdir: Logdir
    store: CheckpointStore
    stop: StopRequest
    first_step: int
    console: rich.console.Console
    step: int = 0
    saved_step: int = 0
    batches: TrainBatches = dataclasses.field(init=False)
    observers: StepObservers = dataclasses.field(init=False)
    writer: MetricsWriter | NoWriter = dataclasses.field(default_factory=NoWriter)
    row: MetricsRow = dataclasses.field(default_factory=dict)
    best: Best | None = None
    saving_time: SavingTime = dataclasses.field(default_factory=SavingTime)
    is_over: bool = False
    is_save_wanted: bool = False
    diverged_since: int | None = None

    def say(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def save(self) -> None:
        """Asks for a checkpoint after the step, or after the next if that one has started."""
        self.is_save_wanted = True

    def end_training(self) -> None:
        """Asks the run to end, as if it had taken all its steps."""
        self.is_over = True

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, before a RollBackError."""
        self.logdir.check_lock()
        self.store.delete_after(step)

    def is_shown(self, step: int) -> bool:
        """Returns whether a step gets a log line and a point on each curve."""
        p = self.params.run
        return step == p.steps or any(
            every and step % every == 0 for every in (p.log_every_steps, p.evaluate_every_steps)
        )

    def working(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context for work that takes long, such as "compiling the evaluation"."""
        return self.observers.working(what)

    def announce(self, what: str, limit: float | None = None) -> None:
        """Announces other work than steps; see `StepObserver.before_other_work`."""
        self.observers.before_other_work(what, limit)

    def check_directory(self, check: Callable[[], None] | None = None) -> None:
        """Checks that the log directory is there and this run's, before it is written.

        A save in the background creates missing folders. If the directory was moved away, later
        files would otherwise go to a second directory.

        Args:
          check: checks it; None checks it in the process that holds the lock.

        Raises:
          OSError: it is not. Names the steps that are lost.
        """
        try:
            (check or self.logdir.check_lock_here)()
        except MovedError as error:
            raise MovedError(
                f"{error}; steps {self.saved_step + 1:,} to {self.step:,} are lost. If it was "
                f"moved, the same command with its new `logdir` resumes from step "
                f"{self.saved_step:,}"
            ) from None


class StepObserver:
    """Is told of each step. Every method does nothing unless a subclass overrides it.

    Attributes:
      every: steps between two calls of `at_period`; 0: it is never called.
    """

    every: int = 0

    def wrap_batches(self, batches: TrainBatches) -> TrainBatches:
        """Returns the batches to train on."""
        return batches

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Is called when the state is there: before the first step, and after each roll back.

        Args:
          checkpoint: the checkpoint of the state, without arrays; None for initial weights.
        """

    def begin(self) -> None:
        """Is called once before the first step, after all observers were told to go on."""

    def needs_idle(self, step: int) -> bool:
        """Returns whether all earlier steps shall be finished before this one begins.

        The devices then wait for the host, so an observer asks for it only where it must.
        """
        return False

    def while_idle(self, step: int) -> None:
        """Is called before a step that an observer needs idle, when all earlier ones have ended.

        Work that takes long belongs here: it counts neither as a step nor as a hang.
        """

    def before_input(self, step: int) -> None:
        """Is called before the loop waits for the step's batch."""

    def before_step(self, step: int, batch: Batch) -> None:
        """Is called when the batch is there, before the step starts."""

    def after_start(self, step: int) -> None:
        """Is called when the step has started, and the metrics of the step before were read."""

    def before_result(self, step: int) -> None:
        """Is called before the loop waits for the devices to finish the step."""

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Is called with the metrics of a step that the devices have finished. May add others."""

    def record(self, step: int, row: MetricsRow) -> None:
        """Is called with the complete metrics of a step. After a roll back a step comes again."""

    def is_due(self, step: int) -> bool:
        """Returns whether `at_period` is called after a step."""
        return self.every > 0 and step % self.every == 0

    def at_period(self, step: int, row: MetricsRow) -> None:
        """Is called after each `every`-th step, before a later one starts.

        Args:
          step: the step. The runtime has the state after it.
        """

    def on_divergence(self, step: int, row: MetricsRow, batch: Batch) -> None:
        """Is called with a step that ended the training, since it was not finite.

        Args:
          step: the step. The runtime has the state before it.

        Raises:
          TrainingFailedError: tells the cause. The run fails without it as well.
        """

    def before_other_work(self, what: str, limit: float | None = None) -> None:
        """Is called before the loop does something else than steps.

        Args:
          what: the loop's work as a verb phrase, such as "evaluates".
          limit: seconds that the work may take before it counts as a hang; None for no limit.
        """

    def working(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Returns a context that lasts while the loop does other work, such as compiling."""
        return contextlib.nullcontext()

    def add_evaluation(self, step: int, dev: MetricsRow) -> None:
        """Is called with metrics of a step that the run resumes from, if its row lacks them."""

    def finish(self) -> None:
        """Is called when all steps are taken, or a request to stop was agreed on."""

    def summary(self) -> list[str]:
        """Returns lines to show after `finish`."""
        return []

    def at_end(self) -> None:
        """Is called once when the loop ends: after its last step, a request to stop or an error."""


# Makes the observer of a run. Raises UserError if the observer cannot watch the run.
ObserverFactory = Callable[[ObservedRun], StepObserver]

# The services of all runs: functions that make the observer of a run, or None if the run's Params
# do not ask for it.
OBSERVERS: Seam[Callable[[ObservedRun], StepObserver | None]] = Seam("observers")


def _told_to_all(name: str) -> Callable[..., None]:
    """Returns a method that calls a method of each observer."""

    def tell(self: StepObservers, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, name)(*arguments)

    return tell


class StepObservers(StepObserver):
    """Tells several observers, in order; of the end, the last one first."""

    def __init__(self, observers: Sequence[StepObserver] = ()):
        """Joins the observers; there may be none."""
        self._observers = list(observers)

    def wrap_batches(self, batches: TrainBatches) -> TrainBatches:
        """Returns the batches that all observers leave."""
        for observer in self._observers:
            batches = observer.wrap_batches(batches)
        return batches

    def needs_idle(self, step: int) -> bool:
        """Returns whether one of the observers needs it."""
        return any([observer.needs_idle(step) for observer in self._observers])

    def is_due(self, step: int) -> bool:
        """Returns whether the period of one of the observers ends with a step."""
        return any(observer.is_due(step) for observer in self._observers)

    def at_period(self, step: int, row: MetricsRow) -> None:
        """Tells the observers whose period ends, by what those before them have asked for."""
        for observer in self._observers:
            if observer.is_due(step):
                observer.at_period(step, row)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Enters the contexts of all observers."""
        with contextlib.ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.working(what))
            yield

    def summary(self) -> list[str]:
        """Returns the lines of all observers."""
        return [line for observer in self._observers for line in observer.summary()]

    def at_end(self) -> None:
        """Tells all observers, also if one of them fails."""
        with contextlib.ExitStack() as stack:
            for observer in self._observers:
                stack.callback(observer.at_end)

    go_on = _told_to_all("go_on")
    begin = _told_to_all("begin")
    while_idle = _told_to_all("while_idle")
    before_input = _told_to_all("before_input")
    before_step = _told_to_all("before_step")
    after_start = _told_to_all("after_start")
    before_result = _told_to_all("before_result")
    before_other_work = _told_to_all("before_other_work")
    after_step = _told_to_all("after_step")
    record = _told_to_all("record")
    on_divergence = _told_to_all("on_divergence")
    add_evaluation = _told_to_all("add_evaluation")
    finish = _told_to_all("finish")
