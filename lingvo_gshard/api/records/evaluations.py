"""evaluate: scores a run on a split, and records the scores in the run's directory."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

import msgspec

from lingvo_gshard.api.decoding.loaded_run import LoadedRun
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.tasks.evaluation import Evaluation
from lingvo_gshard.tasks.evaluation.evaluation import ShowProgress
from lingvo_gshard.training.run.records import evaluations


def evaluate(
    run: LoadedRun, split: str, show_progress: ShowProgress, options: dict[str, Any]
) -> Evaluation:
    """Scores the checkpoint of a run; see `Run.evaluate`.

    Warns if the scores cannot be recorded.
    """
    model, given = run.model, dict(options)
    decodes = model.task.DECODING
    if decodes is not None and decodes.is_evaluated:
        fields = {field.name for field in dataclasses.fields(DecodingOptions)} & set(options)
        searched = {name: options.pop(name) for name in fields}
        usual = DecodingOptions(beam_size=decodes.beam_size)
        decoding = run.published_settings.options(usual, searched)
        if decodes.has_source:
            options["translate"] = run.translator(decoding).translate
        else:
            options["write"] = run.writer(decoding).write
    found = model.task.evaluate(model.runtime, model.input, split, show_progress, **options)
    if run.backend.is_main:
        _record(run, split, given, found)
    return found


def _record(run: LoadedRun, split: str, options: dict[str, Any], found: Evaluation) -> None:
    row = evaluations.EvaluationRow(
        time=time.time(),
        step=run.step,
        split=split,
        precision=run.precision,
        size=found.size,
        options={name: _plain(value) for name, value in options.items()},
        scores=found.to_record(),
    )
    try:
        evaluations.append(run.logdir.place, row)
    except OSError as error:
        warnings.warn(
            f"{evaluations.EVALUATIONS_FILE} cannot be written ({error.strerror}); gshard-report "
            "will lack these scores",
            stacklevel=3,
        )


def _plain(value: Any) -> Any:
    """Returns a value of JSON types; its text if it has none."""
    return msgspec.to_builtins(value, enc_hook=str)
