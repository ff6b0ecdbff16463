"""evaluate and report: scores a run and records them; reads what runs have recorded."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec

from lingvo_gshard.api.decoding.decoder import LoadedRun
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import objects
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.reporting import page
from lingvo_gshard.reporting.runs_report import Report, read_report
from lingvo_gshard.tasks.evaluation import Evaluation
from lingvo_gshard.training.run import run_records


def evaluate(run: LoadedRun, split: str, options: dict[str, Any]) -> Evaluation:
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
            options["write"] = run.text_generator(decoding).write
    found = model.task.evaluate(model.runtime, model.input, split, run.progress, **options)
    if run.backend.is_main:
        _record(run, split, given, found)
    return found


def _record(run: LoadedRun, split: str, options: dict[str, Any], found: Evaluation) -> None:
    row = run_records.EvaluationRow(
        time=time.time(),
        step=run.step,
        split=split,
        precision=run.precision,
        size=found.size,
        options={name: _plain(value) for name, value in options.items()},
        scores=found.to_record(),
    )
    try:
        run_records.append_evaluation(run.logdir.place, row)
    except OSError as error:
        warnings.warn(
            f"{run_records.EVALUATIONS_FILE} cannot be written ({error.strerror}); gshard-report "
            "will lack these scores",
            stacklevel=3,
        )


def _plain(value: Any) -> Any:
    """Converts a value to JSON types. Objects of other types become text."""
    return msgspec.to_builtins(value, enc_hook=str)


def report(
    logdir: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    html: str | os.PathLike | None = None,
) -> Report:
    """Returns what runs have left in their directories: curves, scores, sharding, environment.

    Nothing is computed with the model; a run may still be training.

    Args:
      logdir: directory of a run, or a sequence of directories to compare several runs.
      html: file to write the report to as a page for browsers; None writes none.

    Raises:
      UserError: a directory holds no run or one without metrics, or `html` cannot be written.
    """
    is_one = isinstance(logdir, (str, os.PathLike))
    found = read_report([logdir] if is_one else list(logdir))
    if html is not None:
        try:
            objects.write_bytes(html, page.to_html(found).encode())
        except OSError as error:
            raise UserError(f"`html={html}` cannot be written: {error.strerror}") from None
    return found
