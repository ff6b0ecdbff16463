"""Settings of generation that an imported run was published with."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection, Sequence

from lingvo_gshard.api.experiments import apply_settings
from lingvo_gshard.core import Params
from lingvo_gshard.training import Logdir, read_run, steps_in
from lingvo_gshard.wings.inference.published_settings import PublishedSettings
from lingvo_gshard.wings.open_models import importing
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.importing import Import


def published_settings(logdir: Logdir, params: Params) -> PublishedSettings:
    """Returns the settings in the newest readable checkpoint; none if it was not imported."""
    for step in reversed(steps_in(logdir.checkpoints)):
        try:
            extras = read_run(logdir.checkpoints / str(step)).extras
        except Exception:  # Restoring the checkpoint reports the damage.
            continue
        found = PublishedSettings.read(extras)
        decoding = params.task.cls.DECODING
        if found.fields and decoding is not None and not decoding.has_source:
            return found.within(params.input.length)
        return found
    return PublishedSettings()


def open_model(
    config: str | os.PathLike,
    *,
    length: int = 0,
    precision: str = "float32",
    settings: Sequence[str] = (),
    gin_files: Sequence[str | os.PathLike] = (),
    ignore_keys: Collection[str] = (),
    rows: int = 0,
) -> Params:
    """Returns the experiment that a published `config.json` stands for. No weights are needed.

        >>> params = gshard.open_model("models/llama", precision="bfloat16")
        >>> params.step.precision, params.task.decoder.num_layers
        ('bfloat16', 2)

    Args:
      config: the file, or the directory that has it.
      length: positions of a row in training, and of a generated text; 0: those that the model was
        made for, 1,024 at most.
      precision: types of weights and activations, as `step.precision`.
      settings: gin statements, such as "run.steps = 100"; applied after the files.
      gin_files: paths of gin files.
      ignore_keys: keys of the config that are known not to matter, though no family reads them.
      rows: rows of a batch, which settings may change; 0: eight.

    Raises:
      UserError: the architecture, or an option of it, is unknown.
    """
    params = experiment_of(PublishedConfig.load(config, ignore_keys), length, precision)
    params.input.batch_rows = rows or params.input.batch_rows
    return apply_settings(params, settings, gin_files)


def import_model(
    source: str | os.PathLike,
    logdir: str | os.PathLike,
    *,
    length: int = 0,
    precision: str = "float32",
    settings: Sequence[str] = (),
    gin_files: Sequence[str | os.PathLike] = (),
    ignore_keys: Collection[str] = (),
) -> Import:
    """Writes a run from the directory of a published model, which `load` and `train` then read.

        >>> found = gshard.import_model("models/llama", "runs/llama")
        >>> run = gshard.load(found.logdir)

    Args:
      source: config.json, safetensors and tokenizer files, as Hugging Face's libraries write them.
      logdir: directory of the new run.
      length: as for `open_model`.
      precision: as for `open_model`.
      settings: as for `open_model`; they say how the run will be trained.
      gin_files: as for `open_model`.
      ignore_keys: as for `open_model`.

    Raises:
      UserError: files are missing, damaged, or do not fit the config; or `logdir` exists.
      OSError: the disk is full.
    """
    importing.check_logdir(logdir)
    # Wrong settings are reported before anything is written.
    PublishedSettings.read(pathlib.Path(source))
    params = open_model(
        source,
        length=length,
        precision=precision,
        settings=settings,
        gin_files=gin_files,
        ignore_keys=ignore_keys,
    )
    return importing.import_model(source, logdir, params)
