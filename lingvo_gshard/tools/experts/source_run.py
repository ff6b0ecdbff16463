"""Reads a trained run and writes the run of the model that is made from it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from absl import flags

from lingvo_gshard.api.run import Run
from lingvo_gshard.core import NestedMap, Params, UserError, called_before_abrupt_end, objects
from lingvo_gshard.tools.console import Console
from lingvo_gshard.tools.flags.run import required_logdir
from lingvo_gshard.training import (
    Checkpoint,
    CheckpointStore,
    Logdir,
    Trainer,
    arrays,
    experiments,
    make_trainer,
)
from lingvo_gshard.wings.services.progress import StageDisplay

# The help of --output, which names the new directory.
OUTPUT = "Directory of the new run; it must not exist."


def check_output(path: str | None) -> None:
    """Raises ValueError if --output is missing or exists."""
    if not path:
        raise UserError("--output is missing: the directory of the new run")
    if pathlib.Path(path).exists():
        raise UserError(f"--output={path} exists already; give the name of a new directory")


@contextlib.contextmanager
def opened(values: flags.FlagValues, console: Console) -> Iterator[Run]:
    """Opens the run of --logdir and shows the stages of a `with` block."""
    with StageDisplay(console) as stages:
        stages.begin("Starting")
        run = Run(required_logdir(values))
        run.progress = stages
        yield run


@dataclasses.dataclass(frozen=True)
class SourceRun:
    """The newest readable checkpoint of a run, as NumPy arrays."""

    run: Run
    checkpoint: Checkpoint

    @classmethod
    def read(cls, run: Run, parts: Sequence[str] = ()) -> SourceRun:
        """Reads some or all parts of the newest readable checkpoint. Warns of damaged ones."""
        run.progress.begin("Restoring the weights")
        with run.open_checkpoints() as (store, _):
            checkpoint = store.restore(parts=parts)
        if checkpoint is None:
            raise run.no_checkpoint()
        return cls(run, checkpoint)

    @functools.cached_property
    def trainer(self) -> Trainer:
        """The run's trainer."""
        return self.trainer_of(self.run.params)

    @functools.cached_property
    def theta(self) -> NestedMap:
        """The run's weights."""
        specs = self.trainer.theta_specs
        return arrays.unflatten(specs, self.checkpoint.theta, "weights")

    def trainer_of(self, params: Params) -> Trainer:
        """Returns the trainer of an experiment with this run's vocabularies."""
        return make_trainer(params, experiments.with_vocabulary_sizes(params.task, self.run.input))

    def write(self, output: str, params: Params, state: NestedMap, step: int) -> None:
        """Writes a new run with the vocabularies and the data position of this one.

        If that fails with an OSError, nothing is left in `output`.
        """
        logdir = Logdir(output)
        remove = functools.partial(objects.remove_tree, logdir.place)
        with logdir.claim(params), called_before_abrupt_end(remove):
            try:
                self._save(logdir, params, state, step)
            except BaseException:
                remove()
                raise

    def _save(self, logdir: Logdir, params: Params, state: NestedMap, step: int) -> None:
        said: list[str] = []

        def write_extras(at: pathlib.Path) -> None:
            shutil.copytree(self.checkpoint.extras, at, dirs_exist_ok=True)

        store = CheckpointStore(logdir.checkpoints, params.run.keep_checkpoints, said.append)
        try:
            store.save(step, state, self.checkpoint.position, params.to_text(), write_extras)
            store.finish()
            if store.steps != [step]:
                raise OSError(" ".join(said))
        finally:
            store.close()


def count_parameters(trainer: Trainer) -> int:
    """Returns the number of weights of a trainer's task."""
    return sum(math.prod(spec.shape) for spec in trainer.theta_specs.flatten())
