"""SavedRun: what the directory of a run holds, opened."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

from lingvo_gshard.api.backend import Backend
from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.core import SILENT, NestedMap, Params, Progress, UserError
from lingvo_gshard.data import Input
from lingvo_gshard.tasks import Task
from lingvo_gshard.training import (
    BEST,
    CheckpointStore,
    Logdir,
    Trainer,
    check_choice,
    experiments,
    make_trainer,
    preferred,
    restored_theta,
)
from lingvo_gshard.wings.inference.decoding.precision import TRAINED, check_precision
from lingvo_gshard.wings.services.runtime import DeviceRuntime


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """The weights of a checkpoint, with what goes with them.

    Attributes:
      step: the checkpoint's step.
      task: the model.
      theta: the weights that are evaluated and decoded with.
      input: the run's input, with the vocabularies of the checkpoint.
      load: loads a runtime with the weights.
    """

    step: int
    task: Task
    theta: NestedMap
    input: Input
    load: Callable[[], DeviceRuntime]

    @functools.cached_property
    def runtime(self) -> DeviceRuntime:
        """The runtime, which holds a copy of the weights from its first use on."""
        return self.load()


class SavedRun:
    """A run opened from its directory: Params, checkpoint, input, and the devices to run on.

    As a context manager around all work, a SavedRun joins and leaves a cluster of processes.

    Attributes:
      logdir: paths of the directory.
      params: the experiment.
      options: where and how to run.
      progress: is told how far all work is, such as reading data, compiling and evaluating; by
        default nobody is.
      precision: how the weights are stored and multiplied to translate and generate.
      checkpoint: which checkpoint is read: "best", "newest" or a step.
      compiles_elsewhere: whether another process compiles decoding programs, so that compilation
        takes no memory of this process. This needs the cache of programs, and a CPU.
      compiler_seconds: the other process counts as stuck and is started again if one compilation
        takes more seconds than this.
      is_serving: whether requests are answered now, so that the other process gives way to them.
    """

    progress: Progress = SILENT

    def __init__(
        self,
        logdir: str | os.PathLike,
        options: RuntimeOptions | None = None,
        precision: str = TRAINED,
        checkpoint: str | int = BEST,
    ):
        """Reads the Params of a run.

        Args:
          precision: one of wings/inference/decoding/precision.py.
          checkpoint: as in `load`.

        Raises:
          UserError: the directory holds no trained model, or the precision is unknown; the message
            says what to do.
        """
        check_precision(precision)
        check_choice(checkpoint)
        self._given, self.precision = os.fspath(logdir), precision
        self.checkpoint = checkpoint
        self.options = options or RuntimeOptions()
        self.compiles_elsewhere, self.compiler_seconds = False, 600.0
        self.is_serving = False
        self.logdir = Logdir(logdir)
        advice = f"Train one first: gshard-train --experiment=NAME --logdir={logdir}"
        if not self.logdir.exists():
            raise UserError(f"`logdir={logdir}`: there is no such directory. {advice}")
        if not self.logdir.has_params() and not self.logdir.has_checkpoints():
            raise UserError(f"`logdir={logdir}`: there is no run in it (no params.txt). {advice}")
        self.params: Params = self.logdir.read_params()
        if not self.logdir.has_checkpoints():
            raise UserError(
                f"`logdir={logdir}`: the run of {self.params.name} has no checkpoint yet. One is "
                "saved every run.checkpoint_every_steps steps, at the end, and on Ctrl-C"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._given!r}: {self.params.name}, step {self.step})"

    def __enter__(self) -> Self:
        self.backend.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.backend.__exit__(*error)

    @property
    def step(self) -> int:
        """The step of the checkpoint to restore."""
        steps = preferred(self.logdir.checkpoints, self.checkpoint)
        if not steps:
            raise self.no_checkpoint()
        return steps[0]

    @functools.cached_property
    def input(self) -> Input:
        """The run's input. It reads no data before it is used."""
        made = self.params.input.instantiate()
        made.progress = self.progress
        return made

    @functools.cached_property
    def backend(self) -> Backend:
        """The devices and processes that run the model, connected on first use."""
        return Backend(self.options, self.params, self._given, decodes=True)

    @functools.cached_property
    def model(self) -> TrainedModel:
        """The model of the checkpoint. Damaged ones are reported on standard error."""
        return restored_model(self)

    def no_checkpoint(self) -> UserError:
        """Returns the error of a run whose checkpoints were deleted after it was opened."""
        return UserError(f"{self.logdir.checkpoints} holds no complete checkpoint")

    def make_trainer(self) -> Trainer:
        """Returns the run's trainer. The vocabularies must be loaded."""
        return make_trainer(
            self.params, experiments.with_vocabulary_sizes(self.params.task, self.input)
        )

    @contextlib.contextmanager
    def open_checkpoints(self) -> Iterator[tuple[CheckpointStore, Trainer]]:
        """Loads the vocabularies of the checkpoint and makes the trainer.

        The store reports damaged checkpoints on standard error and changes nothing.

        Raises:
          UserError: there is no readable checkpoint.
        """
        store = CheckpointStore(
            self.logdir.checkpoints,
            say=functools.partial(print, file=sys.stderr),
            writable=False,
            choice=self.checkpoint,
        )
        try:
            found = store.peek()
            if found is None:
                raise self.no_checkpoint()
            self.input.load_vocabularies(found.extras)
            yield store, self.make_trainer()
        finally:
            store.close()


def restored_model(run: SavedRun) -> TrainedModel:
    """Returns the model of a run's checkpoint. Damaged ones are reported on standard error."""
    run.progress.begin("Restoring the weights")
    with run.open_checkpoints() as (store, trainer):
        runtime = run.backend.make_runtime(trainer)
        checkpoint = store.restore(runtime.abstract_state(), parts=(trainer.evaluated_part,))
    if checkpoint is None:
        raise run.no_checkpoint()
    part = restored_theta(trainer, checkpoint)

    def load() -> DeviceRuntime:
        runtime.load_theta(part)
        return runtime

    theta = trainer.evaluated_theta(part)
    return TrainedModel(checkpoint.step, trainer.task, theta, run.input, load)
