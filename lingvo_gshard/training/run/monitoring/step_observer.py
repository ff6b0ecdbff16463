"""StepObserver: the calls that the training loop makes to observers around each step.

A profiler, a watch for hangs or a check of determinism is a `StepObserver`. The loop calls it on
its own thread, in every process of a cluster, for each step in this order:

    needs_idle(step)          shall all earlier steps be finished first?
    while_idle(step)          they are finished, if an observer needs it
    before_input(step)        the loop is about to wait for the step's batch
    before_step(step, batch)  the batch is there, and the step is about to start
    before_result(step)       the loop is about to wait for the devices to finish the step
    after_step(step, row)     the step's metrics were read, so the devices have finished it

`before_other_work` announces evaluations, checkpoints and roll backs. After a roll back the steps
go on from a lower number.

The loop starts a step before it reads the metrics of the step before. `after_step(7)` therefore
usually follows `before_step(8)`. Before an evaluation, a checkpoint and a step that `needs_idle`,
the loop reads metrics at once. A run without observers spends no time on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import rich.console

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data.input import Batch, Input
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.run.monitoring.metrics import MetricsRow
from lingvo_gshard.training.run.runtime_protocol import Runtime
from lingvo_gshard.training.step.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class ObservedRun:
    """The run that an observer watches.

    Attributes:
      params: the experiment's Params.
      trainer: the experiment's trainer.
      runtime: holds the state and runs the steps.
      partitioning: the mesh and strategy; None on one device.
      input_: the batches.
      logdir: the run's directory.
      first_step: number of the first step of this call, from 1; larger in a run that resumes.
      console: where to print; silent in all processes but the main one.
    """

    params: Params
    trainer: Trainer
    runtime: Runtime
    partitioning: Partitioning | None
    input_: Input
    logdir: Logdir
    first_step: int
    console: rich.console.Console

    def say(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class StepObserver:
    """Is told of each step. Every method does nothing unless a subclass overrides it."""

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

    def before_result(self, step: int) -> None:
        """Is called before the loop waits for the devices to finish the step."""

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Is called with the metrics of a step that the devices have finished."""

    def before_other_work(self, what: str, limit: float | None = None) -> None:
        """Is called before the loop does something else than steps.

        Args:
          what: the loop's work as a verb phrase, such as "evaluates".
          limit: seconds that the work may take before it counts as a hang; None for no limit.
        """

    def at_end(self) -> None:
        """Is called once when the loop ends: after its last step, a request to stop or an error."""


# Makes the observer of a run. Raises UserError if the observer cannot watch the run.
ObserverFactory = Callable[[ObservedRun], StepObserver]


def _told_to_all(name: str) -> Callable[..., None]:
    """Returns a method that calls a method of each observer."""

    def tell(self: StepObservers, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, name)(*arguments)

    return tell


class StepObservers(StepObserver):
    """Tells several observers, in order."""

    def __init__(self, observers: Sequence[StepObserver] = ()):
        """Joins the observers; there may be none."""
        self._observers = list(observers)

    def needs_idle(self, step: int) -> bool:
        """Returns whether one of the observers needs it."""
        return any([observer.needs_idle(step) for observer in self._observers])

    while_idle = _told_to_all("while_idle")
    before_input = _told_to_all("before_input")
    before_step = _told_to_all("before_step")
    before_result = _told_to_all("before_result")
    before_other_work = _told_to_all("before_other_work")
    after_step = _told_to_all("after_step")
    at_end = _told_to_all("at_end")
