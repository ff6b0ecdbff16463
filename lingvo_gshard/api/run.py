"""Run: a trained experiment in its directory, to translate, generate, evaluate and report."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import msgspec

from lingvo_gshard.api.decoding.decoder import LoadedRun
from lingvo_gshard.api.decoding.quality import Quality, compare_precisions
from lingvo_gshard.api.export import Export, export
from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.core import UserError, explained, objects
from lingvo_gshard.tasks import Evaluation
from lingvo_gshard.training import BEST
from lingvo_gshard.wings.export.decoder import DecoderSettings
from lingvo_gshard.wings.inference.decoding.precision import INT8, INT8_WEIGHTS, TRAINED
from lingvo_gshard.wings.inference.options import DRAWING, DecodingFields, DecodingOptions
from lingvo_gshard.wings.reporting import page
from lingvo_gshard.wings.reporting.runs_report import Report, read_report
from lingvo_gshard.wings.services import run_records
from lingvo_gshard.wings.services.metrics_rows import rows_of_run


class EvaluationFields(DecodingFields, total=False):
    """Options of `Run.evaluate`. Pass others, of your own task, as `**` a `dict[str, Any]`."""

    languages: Sequence[str]
    max_rows_per_language: int | None
    shuffled: bool
    by_source: bool


def _record(run: LoadedRun, split: str, options: Mapping[str, Any], found: Evaluation) -> None:
    row = run_records.EvaluationRow(
        time=time.time(),
        step=run.step,
        split=split,
        precision=run.precision,
        size=found.size,
        options={name: msgspec.to_builtins(value, enc_hook=str) for name, value in options.items()},
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


def report(
    logdir: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    html: str | os.PathLike | None = None,
) -> Report:
    """Returns what runs have left in their directories: curves, scores, sharding, environment.

    Nothing is computed with the model; a run may still be training.

        >>> report = gshard.report("runs/small", html="report.html")
        >>> len(report.runs)
        1

    Args:
      logdir: directory of a run, or a sequence of directories to compare several runs.
      html: file to write the report to as a page for browsers; None writes none.

    Raises:
      UserError: a directory holds no run or one without metrics, or `html` cannot be written.
    """
    is_one = isinstance(logdir, (str, os.PathLike))
    found = read_report([logdir] if is_one else list(logdir))
    if html is not None:
        with explained(f"`html={html}` cannot be written", OSError):
            objects.write_bytes(html, page.to_html(found).encode())
    return found


def load(
    logdir: str | os.PathLike,
    *,
    runtime: str | None = None,
    mesh: str | None = None,
    strategy: str | None = None,
    options: RuntimeOptions | None = None,
    precision: str = TRAINED,
    checkpoint: str | int = BEST,
) -> Run:
    """Returns the run that `train` or gshard-train left in a directory.

    The weights are restored when they are first needed.

        >>> run = gshard.load("runs/small")
        >>> run.step
        10

    Args:
      logdir: directory of the run.
      runtime: as in `RuntimeOptions`.
      mesh: as in `RuntimeOptions`.
      strategy: as in `RuntimeOptions`.
      options: where and how to run; the arguments above override its fields.
      precision: how the weights are stored and multiplied to translate and generate: "trained",
        "int8" or "int8_weights"; see docs/decoding.md.
      checkpoint: "best", which is the newest if the run keeps no best one; "newest"; or a step.

    Raises:
      UserError: the directory holds no trained model, or an option is wrong.
    """
    options = (options or RuntimeOptions()).override(runtime=runtime, mesh=mesh, strategy=strategy)
    run = Run(logdir, options, precision, checkpoint)
    # Wrong options are reported here, not when the run is first used.
    _ = run.backend
    return run


class Run(LoadedRun):
    """A trained experiment in its directory: translates, generates, is scored and exported.

    >>> run = gshard.load("runs/small")
    >>> len(run.translate(["Non se atopou o ficheiro."], beam_size=1))
    1
    >>> run.metrics()[-1]["step"]
    10
    """

    def metrics(self) -> list[dict[str, float]]:
        """Returns the rows of metrics.jsonl: each has `step` and the metrics of that step."""
        return rows_of_run(self.logdir.path)

    def report(self, html: str | os.PathLike | None = None) -> Report:
        """Returns what `report` does of this run, and writes it to the file `html` as a page."""
        return report(self.logdir.place, html=html)

    def translate(
        self,
        sentences: Sequence[str],
        options: DecodingOptions | None = None,
        **fields: Unpack[DecodingFields],
    ) -> list[str]:
        """Returns the translation of each sentence.

        Warns if a sentence is too long and was cut.

        Args:
          sentences: one text each; an empty one has an empty translation.
          options: how to search; by default beam search with 4 hypotheses, or as the model was
            published.
          **fields: fields of `DecodingOptions` that override `options`, such as beam_size=1.

        Raises:
          UserError: the run's task is not translation.
        """
        if isinstance(sentences, str):
            raise UserError("sentences is one string; a list of strings was expected")
        options = self._options(DecodingOptions(), options, fields)
        translations = self.translator(options).translate(sentences)
        for index in translations.cut:
            warnings.warn(f"sentences[{index}] is too long and was cut", stacklevel=3)
        return translations.texts

    def generate(
        self,
        beginnings: Sequence[str],
        options: DecodingOptions | None = None,
        **fields: Unpack[DecodingFields],
    ) -> list[list[str]]:
        """Returns texts that continue each beginning: `options.best` for each.

        Warns if a beginning is too long. The model then sees only the last part of the beginning.

        Args:
          beginnings: starts of texts; an empty one lets the model begin.
          options: how to choose tokens; by default they are drawn, with temperature 1, or as the
            model was published.
          **fields: fields of `DecodingOptions` that override `options`, such as temperature=0.8.

        Raises:
          UserError: the run's task is not language modeling.
        """
        if isinstance(beginnings, str):
            raise UserError("beginnings is one string; a list of strings was expected")
        options = self._options(DRAWING, options, fields)
        texts = list(self.text_generator(options).write(beginnings))
        for index, text in enumerate(texts):
            if text.cut:
                warnings.warn(
                    f"beginnings[{index}] is too long: its first {text.cut} tokens were not seen",
                    stacklevel=3,
                )
        return [text.texts for text in texts]

    def evaluate(self, split: str = "test", **options: Unpack[EvaluationFields]) -> Evaluation:
        """Scores the model on a split of its data, as the run's task defines.

        The scores are also appended to evaluations.jsonl in the run's directory, for its report.
        Warns if they cannot be.

        Args:
          split: "train", "dev" or "test".
          **options: options of the task's `evaluate`, such as languages=["es"] for translation,
            and fields of `DecodingOptions`, such as beam_size=1, for a task that translates.

        Raises:
          UserError: the split is empty, or an option is wrong.
        """
        model, rest = self.model, dict[str, Any](options)
        decodes = model.task.DECODING
        if decodes is not None and decodes.is_evaluated:
            fields = DecodingFields.__annotations__.keys() & rest.keys()
            searched = {name: rest.pop(name) for name in fields}
            # Scores must repeat.
            usual = DecodingOptions(beam_size=decodes.beam_size, seed=0)
            decoding = self.published_settings.options(usual, searched)
            if decodes.has_source:
                rest["translate"] = self.translator(decoding).translate
            else:
                rest["write"] = self.text_generator(decoding).write
        found = model.task.evaluate(model.runtime, model.input, split, self.progress, **rest)
        if self.backend.is_main:
            _record(self, split, options, found)
        return found

    def _options(
        self, usual: DecodingOptions, options: DecodingOptions | None, fields: DecodingFields
    ) -> DecodingOptions:
        """Returns the options that a caller asks for; the published model's options are default."""
        if options is not None:
            return dataclasses.replace(options, **fields)
        return self.published_settings.options(usual, fields)

    def export(
        self, output: str | os.PathLike, format: str, settings: DecoderSettings | None = None
    ) -> Export:
        """Writes the model for programs that do not have this package; see docs/decoding.md.

        Args:
          output: the new directory. It is complete or not there at all.
          format: "safetensors", "stablehlo", "saved_model", "huggingface", "huggingface_4bit" or
            "peft".
          settings: how the exported model decodes; for "stablehlo" and "saved_model".

        Raises:
          UserError: the directory exists and is not empty, or cannot be written; the format is
            unknown, or not one for the run's task; or its packages are missing.
        """
        return export(self, output, format, settings)

    def compare_precisions(
        self,
        precisions: Sequence[str] = (TRAINED, INT8, INT8_WEIGHTS),
        split: str = "dev",
        limit: int = 500,
        options: DecodingOptions | None = None,
    ) -> list[Quality]:
        """Translates rows with each precision, and scores the translations.

        Args:
          precisions: the precisions to compare. The others are compared with the first.
          split: "train", "dev" or "test".
          limit: translates a fixed random choice of at most this many rows.
          options: how to search.

        Raises:
          UserError: the run's task is not translation, or the split is empty.
        """
        return compare_precisions(self, precisions, split, limit, options)
