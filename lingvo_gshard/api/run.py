"""Run: a trained experiment in its directory, to translate, generate and evaluate with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lingvo_gshard.api.backend import Backend
from lingvo_gshard.api.decoding.decoder import Decoder, TrainedModel, open_decoder, restored_model
from lingvo_gshard.api.decoding.quality import Quality, compare_precisions
from lingvo_gshard.api.export import Export, export
from lingvo_gshard.api.open_models.published_settings import published_settings
from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.api.records.evaluations import evaluate
from lingvo_gshard.api.records.report import Report, report
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.input import Input
from lingvo_gshard.data.observer import Observer, SilentObserver
from lingvo_gshard.decoding.precision import INT8, INT8_WEIGHTS, TRAINED, check_precision
from lingvo_gshard.export.decoder import DecoderSettings
from lingvo_gshard.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.inference.published_settings import PublishedSettings
from lingvo_gshard.inference.translator import Translator
from lingvo_gshard.inference.writer import Writer
from lingvo_gshard.tasks import Task
from lingvo_gshard.tasks.evaluation import Evaluation
from lingvo_gshard.tasks.evaluation.evaluation import ShowProgress, no_progress
from lingvo_gshard.training.experiments import make_trainer, with_vocabulary_sizes
from lingvo_gshard.training.run.checkpoint.choice import BEST, check_choice, preferred
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.step.trainer import Trainer


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

    Args:
      logdir: directory of the run.
      runtime: as in `RuntimeOptions`.
      mesh: as in `RuntimeOptions`.
      strategy: as in `RuntimeOptions`.
      options: where and how to run; the arguments above override its fields.
      precision: how the weights are stored and multiplied to translate and generate: "trained",
        "int8" or "int8_weights"; see docs/decoding_speed.md.
      checkpoint: "best", which is the newest if the run keeps no best one; "newest"; or a step.

    Raises:
      UserError: the directory holds no trained model, or an option is wrong.
    """
    options = (options or RuntimeOptions()).override(runtime=runtime, mesh=mesh, strategy=strategy)
    run = Run(logdir, options, precision, checkpoint)
    # Wrong options are reported here, not when the run is first used.
    _ = run.backend
    return run


class Run:
    """A trained experiment in its directory.

    As a context manager around all work it joins and leaves a cluster of processes.

    Attributes:
      logdir: paths of the directory.
      params: the experiment.
      options: where and how to run.
      observer: is told how far reading data, loading and compiling are; by default nobody is.
      precision: how the weights are stored and multiplied to translate and generate.
      checkpoint: which checkpoint is read: "best", "newest" or a step.
      compiles_elsewhere: whether another process compiles decoding programs, which keeps the memory
        that it takes out of this one. It needs the cache of programs, and a CPU.
      compiler_seconds: after which that process is stuck with a program, and is started anew.
    """

    observer: Observer = SilentObserver()

    def __init__(
        self,
        logdir: str | os.PathLike,
        options: RuntimeOptions | None = None,
        precision: str = TRAINED,
        checkpoint: str | int = BEST,
    ):
        """Reads the Params of a run.

        Args:
          logdir: directory of the run.
          options: where and how to run.
          precision: one of decoding/precision.py.
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
        return f"Run({self._given!r}: {self.params.name}, step {self.step})"

    def __enter__(self) -> Run:
        self.backend.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.backend.__exit__(kind, error, trace)

    @property
    def step(self) -> int:
        """The step of the restored checkpoint; before that, of the checkpoint to restore."""
        restored = self.__dict__.get("model") or self.__dict__.get("decoder")
        if restored:
            return restored.step
        steps = preferred(self.logdir.checkpoints, self.checkpoint)
        if not steps:
            raise self.no_checkpoint()
        return steps[0]

    @functools.cached_property
    def input(self) -> Input:
        """The run's input. It reads no data before it is used."""
        made = self.params.input.instantiate()
        made.observer = self.observer
        return made

    @functools.cached_property
    def backend(self) -> Backend:
        """The devices and processes that run the model, connected on first use."""
        return Backend(self.options, self.params, self._given, decodes=True)

    @functools.cached_property
    def model(self) -> TrainedModel:
        """The model of the checkpoint. Damaged ones are reported on standard error."""
        return restored_model(self)

    def metrics(self) -> list[dict[str, float]]:
        """Returns the rows of metrics.jsonl: each has `step` and the metrics of that step."""
        text = (self.logdir.path / "metrics.jsonl").read_bytes()
        return [msgspec.json.decode(line) for line in text.splitlines()]

    def report(self, html: str | os.PathLike | None = None) -> Report:
        """Returns what `report` does of this run, and writes it to the file `html` as a page."""
        return report(self.logdir.place, html=html)

    def translate(
        self, sentences: Sequence[str], options: DecodingOptions | None = None, **fields: Any
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
        self, beginnings: Sequence[str], options: DecodingOptions | None = None, **fields: Any
    ) -> list[list[str]]:
        """Returns texts that continue each beginning: `options.best` for each.

        Warns if a beginning is too long: the model sees only its end.

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
        texts = list(self.writer(options).write(beginnings))
        for index, text in enumerate(texts):
            if text.cut:
                warnings.warn(
                    f"beginnings[{index}] is too long: its first {text.cut} tokens were not seen",
                    stacklevel=3,
                )
        return [text.texts for text in texts]

    def evaluate(
        self,
        split: str = "test",
        show_progress: ShowProgress = no_progress,
        **options: Any,
    ) -> Evaluation:
        """Scores the model on a split of its data, as the run's task defines.

        The scores are also appended to evaluations.jsonl in the run's directory, for its report.

        Args:
          split: "train", "dev" or "test".
          show_progress: opens progress bars.
          **options: options of the task's `evaluate`, such as languages=["es"] for translation,
            and fields of `DecodingOptions`, such as beam_size=1, for a task that translates.

        Raises:
          UserError: the split is empty, or an option is wrong.
        """
        return evaluate(self, split, show_progress, options)

    @functools.cached_property
    def published_settings(self) -> PublishedSettings:
        """How an imported model was published to be decoded; nothing for other runs."""
        return published_settings(self.logdir, self.params)

    def _options(
        self, usual: DecodingOptions, options: DecodingOptions | None, fields: dict[str, Any]
    ) -> DecodingOptions:
        """Returns the options that a caller asks for, by default those of the published model."""
        if options is not None:
            return dataclasses.replace(options, **fields)
        return self.published_settings.options(usual, fields)

    @functools.cached_property
    def decoder(self) -> Decoder:
        """What translators and writers of this run share.

        Raises:
          UserError: the run's task decodes nothing.
        """
        return open_decoder(self)

    def export(
        self,
        output: str | os.PathLike,
        format: str,
        settings: DecoderSettings | None = None,
        show_progress: ShowProgress = no_progress,
    ) -> Export:
        """Writes the model for programs that do not have this package; see docs/export.md.

        Args:
          output: the new directory. It is complete or not there at all.
          format: "safetensors", "stablehlo" or "saved_model".
          settings: how the exported model decodes; not for "safetensors".
          show_progress: opens progress bars.

        Raises:
          UserError: the directory exists and is not empty, or cannot be written; the format is
            unknown, or not one for the run's task; or its packages are missing.
        """
        return export(self, output, format, settings, show_progress)

    def compare_precisions(
        self,
        precisions: Sequence[str] = (TRAINED, INT8, INT8_WEIGHTS),
        split: str = "dev",
        limit: int = 500,
        options: DecodingOptions | None = None,
        show_progress: ShowProgress = no_progress,
    ) -> list[Quality]:
        """Translates rows with each precision, and scores the translations.

        Args:
          precisions: what to compare; the first is what others are compared with.
          split: "train", "dev" or "test".
          limit: translates a fixed random choice of at most this many rows.
          options: how to search.
          show_progress: opens progress bars.

        Raises:
          UserError: the run's task is not translation, or the split is empty.
        """
        return compare_precisions(self, precisions, split, limit, options, show_progress)

    def translator(self, options: DecodingOptions | None = None) -> Translator:
        """Returns a translator of this model. Programs are compiled when first needed.

        Args:
          options: how to search.

        Raises:
          UserError: the run's task is not translation.
        """
        self.check_decoder(Translator)
        input_: Any = self.decoder.input
        source, target = input_.source_vocabulary, input_.target_vocabulary
        return Translator(self.decoder.engine, source, target, options)

    def writer(self, options: DecodingOptions | None = None) -> Writer:
        """Returns a writer of this model. Programs are compiled when first needed.

        Args:
          options: how to choose tokens; by default they are drawn, with temperature 1.

        Raises:
          UserError: the run's task is not language modeling.
        """
        self.check_decoder(Writer)
        input_: Any = self.decoder.input
        return Writer(self.decoder.engine, input_.vocabulary, options)

    def check_decoder(self, decoder: type) -> None:
        """Raises ValueError naming the run's task if it does not decode with a `decoder`."""
        task: type[Task] = self.params.task.cls
        if task.DECODER != decoder.__name__:
            raise UserError(
                f"`logdir={self._given}`: the run of {self.params.name} has the task "
                f"{task.__name__}, which has no {decoder.__name__}"
            )

    def no_checkpoint(self) -> UserError:
        """Returns the error of a run whose checkpoints were deleted after it was opened."""
        return UserError(f"{self.logdir.checkpoints} holds no complete checkpoint")

    def make_trainer(self) -> Trainer:
        """Returns the run's trainer. The vocabularies must be loaded."""
        return make_trainer(self.params, with_vocabulary_sizes(self.params.task, self.input))

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
