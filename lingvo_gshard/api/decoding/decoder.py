"""The decoder of a run, from the start-up cache where it can."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from lingvo_gshard.api.decoding.compiler_process import CompilerProcess
from lingvo_gshard.api.importing import published_settings
from lingvo_gshard.api.saved_run import SavedRun, restored_model
from lingvo_gshard.core import Params, UserError, cached
from lingvo_gshard.data import Input
from lingvo_gshard.runtime import Program, platform_of
from lingvo_gshard.tasks import Task, TokenTask
from lingvo_gshard.training import Checkpoint, preferred, read_run
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.loading import facts_of, mesh_of
from lingvo_gshard.wings.inference.model_facts import ModelFacts
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.programs import startup_cache
from lingvo_gshard.wings.inference.programs.executables import Executables, ProgramKey
from lingvo_gshard.wings.inference.programs.maker import ProgramMaker, row_parts
from lingvo_gshard.wings.inference.programs.preparation import prepared_weights
from lingvo_gshard.wings.inference.programs.startup_cache import CacheEntry, code_stamp, environment
from lingvo_gshard.wings.inference.published_settings import PublishedSettings
from lingvo_gshard.wings.inference.text_generator import TextGenerator
from lingvo_gshard.wings.inference.translator import Translator


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A trained model that is ready to decode; the input has the vocabularies of its checkpoint."""

    step: int
    engine: Engine
    input: Input


def open_decoder(run: SavedRun) -> Decoder:
    """Returns the decoder of a run's checkpoint.

    If the cache has it, TensorFlow is imported only when a program is needed that the cache lacks.

    Raises:
      UserError: the run's task decodes nothing.
    """
    task: type[Task] = run.params.task.cls
    if task.DECODING is None:
        raise UserError(f"{task.__name__}, the task of this run, decodes nothing")
    run.progress.begin("Loading the model")
    devices, partitioning = run.backend.devices, run.backend.partitioning
    chosen = None if "model" in run.__dict__ else _chosen(run)
    entry = _entry(run, chosen)
    found = entry.read_model(mesh_of(partitioning, devices)) if entry else None
    elsewhere = _compiler(run) if entry else None
    if entry and elsewhere and not found:
        elsewhere()
        found = entry.read_model(mesh_of(partitioning, devices))
    if found:
        assert chosen is not None
        run.input.load_vocabularies(chosen.extras)
        facts, weights = found
        executables = Executables(
            _late_maker(run, facts),
            devices,
            entry,
            row_parts(partitioning),
            run.progress,
            elsewhere,
        )
        return Decoder(chosen.step, Engine(facts, executables, weights), run.input)
    return _opened_now(run)


def _opened_now(run: SavedRun) -> Decoder:
    """Returns the decoder of the run's restored model, and adds it to the cache."""
    # A model that nothing else needs is freed as soon as the decoding weights are made.
    is_last = "model" not in run.__dict__
    model, devices = restored_model(run) if is_last else run.model, run.backend.devices
    facts = facts_of(model.task, model.input.p, text_ids=model.input.text_ids)
    run.progress.begin("Preparing the weights")
    make = _maker(run, model.task, facts).make
    entry = _entry(run, _checkpoint(run, model.step))
    parts = row_parts(run.backend.partitioning)
    executables = Executables(make, devices, entry, parts, run.progress)
    arrays, weights = prepared_weights(executables, model.theta, is_last)
    if entry:
        entry.write_model(os.fspath(run.logdir.place), facts, arrays, weights)
        startup_cache.prune(entry)
    return Decoder(model.step, Engine(facts, executables, weights), model.input)


def _compiler(run: SavedRun) -> CompilerProcess | None:
    """Returns the process that compiles for a run; None if it compiles for itself.

    Two processes cannot share an accelerator.
    """
    if not run.compiles_elsewhere or run.backend.devices[0].platform != "cpu":
        return None
    return CompilerProcess(
        os.fspath(run.logdir.place),
        run.options,
        run.precision,
        run.checkpoint,
        run.compiler_seconds,
        lambda: run.is_serving,
    )


def _maker(run: SavedRun, task: Task, facts: ModelFacts) -> ProgramMaker:
    assert isinstance(task, TokenTask)
    backend = run.backend
    platform = platform_of(backend.devices[0])
    return ProgramMaker(
        task, facts, backend.partitioning, backend.partitioner, run.precision, platform
    )


def _late_maker(run: SavedRun, facts: ModelFacts) -> Callable[[ProgramKey], Program]:
    """Returns what makes programs that a cache lacks. The model is built when one is needed."""
    maker = functools.cache(lambda: _maker(run, run.make_trainer().task, facts))
    return lambda key: maker().make(key)


def _chosen(run: SavedRun) -> Checkpoint | None:
    """Returns the run's checkpoint, without its arrays; None if it cannot be read."""
    steps = preferred(run.logdir.checkpoints, run.checkpoint)
    return _checkpoint(run, steps[0]) if steps else None


def _checkpoint(run: SavedRun, step: int) -> Checkpoint | None:
    try:
        return read_run(run.logdir.checkpoints / str(step))
    except Exception:  # Restoring it reports what is wrong.
        return None


def _entry(run: SavedRun, checkpoint: Checkpoint | None) -> CacheEntry | None:
    """Returns the cache's entry for a checkpoint, which may not exist; None without a cache."""
    given = run.options.compilation_cache
    if given == "" or checkpoint is None or run.options.cluster is not None:
        return None
    directory = cached.directory("decoding")
    if given:
        directory = os.path.join(os.path.expanduser(given), "decoding")
    backend = run.backend
    owner = [
        os.fspath(run.logdir.place),
        repr(backend.partitioning),
        backend.partitioner,
        run.precision,
    ]
    content = {
        "params": run.params.to_text(),
        "code": code_stamp(_modules(run.params)),
        "arrays": checkpoint.record.digests,
        "files": checkpoint.record.files,
        "environment": environment(device.device_kind for device in backend.devices),
        "owner": owner,
    }
    return startup_cache.find_entry(directory, owner, content)


def _modules(params: Params) -> list[pathlib.Path]:
    """Returns the files of the modules whose classes and functions Params name."""
    named = [node.cls for _, node in params.nodes()] + [value for _, value in params.leaves()]
    names = {value.__module__ for value in named if hasattr(value, "__qualname__")}
    modules = [sys.modules.get(name) for name in names]
    return [pathlib.Path(m.__file__) for m in modules if m is not None and m.__file__]


class LoadedRun(SavedRun):
    """A saved run with its restored model, and with a decoder for the model."""

    @property
    def step(self) -> int:
        """The step of the restored checkpoint; before that, of the checkpoint to restore."""
        restored = self.__dict__.get("model") or self.__dict__.get("decoder")
        return restored.step if restored else super().step

    @functools.cached_property
    def published_settings(self) -> PublishedSettings:
        """Settings of generation that an imported model was published with; none for other runs."""
        return published_settings(self.logdir, self.params)

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The part that translators and text generators of this run share.

        Raises:
          UserError: the run's task decodes nothing.
        """
        return open_decoder(self)

    def translator(self, options: DecodingOptions | None = None) -> Translator:
        """Returns a translator of this model. Programs are compiled when first needed.

        Raises:
          UserError: the run's task is not translation.
        """
        self.check_decoder(Translator)
        input_: Any = self.decoder.input
        source, target = input_.source_vocabulary, input_.target_vocabulary
        return Translator(self.decoder.engine, source, target, options)

    def text_generator(self, options: DecodingOptions | None = None) -> TextGenerator:
        """Returns a text generator of this model. Programs are compiled when first needed.

        Args:
          options: how to choose tokens; by default they are drawn, with temperature 1.

        Raises:
          UserError: the run's task is not language modeling.
        """
        self.check_decoder(TextGenerator)
        input_: Any = self.decoder.input
        return TextGenerator(self.decoder.engine, input_.vocabulary, options)

    def check_decoder(self, decoder: type[Translator] | type[TextGenerator]) -> None:
        """Raises UserError naming the run's task if it does not decode with a `decoder`."""
        task: type[Task] = self.params.task.cls
        if task.DECODING is None or task.DECODING.has_source != decoder.HAS_SOURCE:
            does = "decodes no texts"
            if task.DECODING and task.DECODING.has_source:
                does = "translates (gshard-translate) and does not continue texts"
            elif task.DECODING:
                does = "continues texts (gshard-generate) and does not translate"
            raise UserError(
                f"`logdir={self._given}`: the run of {self.params.name} has the task "
                f"{task.__name__}, which {does}"
            )
