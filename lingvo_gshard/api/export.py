"""export: writes a trained run in a format that other programs read."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from lingvo_gshard.core.config import names
from lingvo_gshard.export import safetensors_writer
from lingvo_gshard.export.new_directory import check_output, file_sizes, new_directory
from lingvo_gshard.export.trained_model import TrainedModel
from lingvo_gshard.training.checkpoint.store import CheckpointStore
from lingvo_gshard.training.checkpoint.trainer_state import restored_theta
from lingvo_gshard.training.experiments import with_vocabulary_sizes

if TYPE_CHECKING:
    from lingvo_gshard.api.run import Run

FORMATS = {"safetensors": safetensors_writer.write}


@dataclasses.dataclass(frozen=True)
class Export:
    """What an export wrote.

    Attributes:
      directory: where.
      format: one of `FORMATS`.
      experiment: name of the experiment.
      step: the step of the checkpoint.
      files: path within the directory -> size in bytes.
      seconds: the time that reading and writing took.
    """

    directory: str
    format: str
    experiment: str
    step: int
    files: dict[str, int]
    seconds: float

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())


def check_format(name: str) -> None:
    """Raises ValueError with the nearest valid name if a format is unknown."""
    if name not in FORMATS:
        raise ValueError(f"--format={name} is unknown. {names.nearest(name, FORMATS)}")


def export(run: Run, output: str | os.PathLike, format: str) -> Export:
    """Writes the newest readable checkpoint of a run; see `Run.export`."""
    started = time.monotonic()
    check_format(format)
    check_output(output)
    model = _read(run)
    with new_directory(output, model.nbytes) as directory:
        FORMATS[format](model, directory)
    directory = pathlib.Path(output)
    return Export(
        directory=os.fspath(output),
        format=format,
        experiment=model.params.name,
        step=model.step,
        files=file_sizes(directory),
        seconds=time.monotonic() - started,
    )


def _read(run: Run) -> TrainedModel:
    """Returns the newest readable checkpoint; reports damaged ones on standard error."""
    store = CheckpointStore(
        run.logdir.checkpoints, say=lambda text: print(text, file=sys.stderr), writable=False
    )
    try:
        newest = store.peek()
        if newest is None:
            raise run.no_checkpoint()
        run.input.load_vocabularies(newest.extras)
        task = with_vocabulary_sizes(run.params.task, run.input)
        trainer = run.params.trainer.instantiate(task)
        checkpoint = store.restore(parts=(trainer.evaluated_part,))
        if checkpoint is None:
            raise run.no_checkpoint()
    finally:
        store.close()
    specs, found = trainer.theta_specs, restored_theta(trainer, checkpoint)
    pairs = zip(specs.flatten(), found.flatten(), strict=True)
    return TrainedModel(
        params=run.params,
        step=checkpoint.step,
        task=trainer.task,
        specs=specs,
        theta=specs.pack(np.asarray(value).astype(spec.dtype, copy=False) for spec, value in pairs),
        averaged=trainer.evaluated_part != "theta",
        input=run.input,
    )
