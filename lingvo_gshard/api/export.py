"""export: writes a trained run in a format that other programs read."""

from __future__ import annotations

import dataclasses
import os
import time

import numpy as np

from lingvo_gshard.api.decoding.decoder import LoadedRun
from lingvo_gshard.training import restored_theta
from lingvo_gshard.wings.export.decoder import DecoderSettings, TrainedModel
from lingvo_gshard.wings.export.formats import IN_4_BITS, PEFT, format_of
from lingvo_gshard.wings.export.new_directory import check_output, file_sizes, new_directory
from lingvo_gshard.wings.open_models.exporting import ExportSource, PublishedAdapter


@dataclasses.dataclass(frozen=True)
class Export:
    """The files that an export wrote.

    Attributes:
      directory: where.
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


def export(
    run: LoadedRun, output: str | os.PathLike, format: str, settings: DecoderSettings | None = None
) -> Export:
    """Writes the checkpoint of a run; see `Run.export`."""
    started = time.monotonic()
    chosen = format_of(format)
    check_output(output)
    chosen.check(format, run.params, settings)
    if chosen.is_streamed:
        step = _stream(run, output, format)
    else:
        model = _read(run)
        run.progress.begin(f"Writing {format}")
        with new_directory(output, model.nbytes) as directory:
            chosen.write(model, directory, settings, run.progress)
        step = model.step
    return Export(
        directory=os.fspath(output),
        format=format,
        experiment=run.params.name,
        step=step,
        files=file_sizes(output),
        seconds=time.monotonic() - started,
    )


def _stream(run: LoadedRun, output: str | os.PathLike, format: str) -> int:
    """Writes a published model without loading it whole. Returns the step of the checkpoint."""
    with run.open_checkpoints() as (_, trainer):
        step = run.step
        source = ExportSource.open(
            run.logdir.checkpoints / str(step),
            trainer.evaluated_part,
            run.params,
            trainer,
            in_4_bits=format == IN_4_BITS,
        )
        adapter = PublishedAdapter.of(source, trainer) if format == PEFT else None
    run.progress.begin(f"Writing {format}")
    written = adapter or source
    with new_directory(output, written.nbytes) as directory:
        written.write(directory)
    return step


def _read(run: LoadedRun) -> TrainedModel:
    run.progress.begin("Restoring the weights")
    with run.open_checkpoints() as (store, trainer):
        checkpoint = store.restore(parts=(trainer.evaluated_part,))
    if checkpoint is None:
        raise run.no_checkpoint()
    task, params = trainer.task.plain, run.params.copy()
    params.task.lora.rank = 0
    specs, found = task.variable_specs(), trainer.task.merged(restored_theta(trainer, checkpoint))
    pairs = zip(specs.flatten(), found.flatten(), strict=True)
    return TrainedModel(
        params=params,
        step=checkpoint.step,
        task=task,
        specs=specs,
        theta=specs.pack(np.asarray(value).astype(spec.dtype, copy=False) for spec, value in pairs),
        averaged=trainer.evaluated_part != "theta",
        input=run.input,
    )
