"""train: trains an experiment, from its start or from the newest checkpoint."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, cast

import numpy as np
import rich.console
import rich.table

from lingvo_gshard.api import tables
from lingvo_gshard.api.backend import Backend
from lingvo_gshard.api.closed_output import GuardedStream
from lingvo_gshard.api.experiments import as_params
from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.core import Params, Progress, names, objects, params_text, processes, signals
from lingvo_gshard.data import Batch, CleaningReport, EmbeddedCorpus, Input
from lingvo_gshard.training import (
    METRICS_FILE,
    Checkpoint,
    CheckpointStore,
    Logdir,
    ObservedRun,
    ObserverFactory,
    Outcome,
    Trainer,
    TrainingLoop,
    experiments,
    make_trainer,
)
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.fine_tuning.starting import FirstWeights, StartingPoint
from lingvo_gshard.wings.services import divergence, run_records, snapshots, trackers
from lingvo_gshard.wings.services.determinism import checked
from lingvo_gshard.wings.services.dev_evaluation import ends_training
from lingvo_gshard.wings.services.hang_watch import HangWatch
from lingvo_gshard.wings.services.progress import StageDisplay
from lingvo_gshard.wings.services.runtime import DeviceRuntime
from lingvo_gshard.wings.services.snapshots import snapshot_run


def print_summary(
    console: rich.console.Console,
    params: Params,
    input_: Input,
    trainer: Trainer,
    runtime: DeviceRuntime,
) -> None:
    """Prints the experiment, the model's size, the devices, and how the corpus was cleaned."""
    total = sum(math.prod(spec.shape) for spec in trainer.theta_specs.flatten())
    active = active_parameters(trainer.task)
    facts = [
        ("experiment", params.name),
        ("parameters", f"{total:,} in all, {active:,} used by each token"),
        ("devices", runtime.device_summary),
    ]
    sizes = input_.vocabulary_sizes()
    if sizes:
        facts.append(("vocabulary", ", ".join(f"{name} {size:,}" for name, size in sizes.items())))
    filled = share_filled(experiments.first_batch(input_, trainer.p.seed))
    if filled is not None:
        facts.append(("packing", f"{filled:.1%} of a batch's positions hold tokens"))
    tables.print_facts(console, [*facts, ("steps", f"{trainer.steps:,}")])
    if input_.report is not None:
        print_report(console, input_.report)
    for note in input_.notes:
        _say(console, note)


def print_report(console: rich.console.Console, report: CleaningReport) -> None:
    """Prints how many rows were kept and dropped, with an example of each reason."""
    rows = "training rows" if report.split == "train" else f"rows of {report.split}"
    table = rich.table.Table(rows, rich.table.Column("", justify="right"))
    for what, count in report.to_table():
        table.add_row(what, f"{count:,}")
    tables.print_table(console, table)
    for reason, example in sorted(report.examples.items()):
        _say(console, f"{reason}, for example {example}")


def share_filled(batch: Batch) -> float | None:
    """Returns the share of positions that hold tokens; None for a batch without segments."""
    segments = [value for name, value in batch.items() if name.endswith("_segments")]
    if not segments:
        return None
    filled = sum(np.count_nonzero(value) for value in segments)
    return filled / sum(value.size for value in segments)


def train(
    params: Params,
    logdir: str | os.PathLike,
    *,
    init_from: str | os.PathLike | None = None,
    steps: int | None = None,
    runtime: str | None = None,
    mesh: str | None = None,
    strategy: str | None = None,
    options: RuntimeOptions | None = None,
    console: rich.console.Console | None = None,
    observers: Sequence[ObserverFactory] = (),
) -> Outcome:
    """Trains an experiment, from the newest checkpoint in `logdir` if there is one.

    On Ctrl-C, SIGTERM and SIGHUP, and when nobody reads the console any more, training finishes the
    step, saves a checkpoint and returns. A second call with the same experiment and directory
    resumes the run; a finished one stays as it is. One `train` at a time may use a directory.

        >>> quiet = rich.console.Console(quiet=True)
        >>> gshard.train(params, "runs/small", steps=10, console=quiet).finished
        True

    Args:
      params: the experiment, as `experiment` returns it.
      logdir: directory of the run; created if it is new.
      init_from: directory of a run to start with its newest weights, or of a published model.
      steps: total number of steps; None: `run.steps`.
      runtime, mesh, strategy: as in `RuntimeOptions`.
      options: where and how to run; the arguments above override its fields.
      console: shows progress; None: standard output. `Console(quiet=True)` shows nothing.
      observers: functions that make what watches the run step by step.

    Returns:
      How training ended.

    Raises:
      UserError: an argument or hyperparameter is wrong, or another run uses `logdir`.
      TrainingFailedError: the run cannot go on, as with a loss that is not finite.
      OSError: a checkpoint cannot be saved, or another run took `logdir` over.
    """
    options = (options or RuntimeOptions()).override(runtime=runtime, mesh=mesh, strategy=strategy)
    console, directory = console or rich.console.Console(), Logdir(logdir)
    params = _prepared(as_params(params), steps)
    try:
        with (
            signals.StopRequest() as stop,
            _stopping_when_closed(console, stop),
            StageDisplay(console) as progress,
            _backend(options, params, str(logdir), progress) as backend,
        ):
            backend.cluster.logdir = directory
            _check_backend(backend, params, options, console)
            console.quiet = console.quiet or not backend.is_main
            # Before the run's directory is written: a wrong name leaves nothing behind.
            start = _starting_point(init_from, directory, params, console)
            with directory.claim(params, functools.partial(_say, console)):
                return _train(params, backend, directory, start, stop, console, progress, observers)
    except signals.StoppedError as stopped:
        return Outcome(step=directory.last_step or 0, finished=False, signal=str(stopped))


def _prepared(params: Params, steps: int | None) -> Params:
    """Returns a copy of the Params of a run, checked as far as possible without reading data.

    Raises:
      UserError: a hyperparameter is wrong, or the package of a writer is missing.
    """
    params = params.copy().locate()
    if steps is not None:
        params.run.steps = steps
    trackers.check(params.run.writers)
    params.run.instantiate()
    _check_languages(params.input)
    _ = make_trainer(params)
    return params


def _check_languages(given: Params) -> None:
    """Raises UserError if an input names a language that the text in the package lacks."""
    if "languages" in given and "corpus" in given and given.corpus.cls is EmbeddedCorpus:
        valid = objects.text_beside(__file__, "embedded_languages.txt").split()
        for language in names.listed(given.languages):
            names.check(language, valid, f"input.languages: the corpus has no {language!r}")


def _backend(options: RuntimeOptions, params: Params, logdir: str, progress: Progress) -> Backend:
    """Makes the backend to run on. Imports TensorFlow and finds devices, which takes seconds."""
    progress.begin("Starting")
    return Backend(options, params, logdir)


@contextlib.contextmanager
def _stopping_when_closed(
    console: rich.console.Console, stop: signals.StopRequest
) -> Iterator[None]:
    """Asks to stop if nobody reads the console any more."""
    file = console.file
    guarded = GuardedStream(file, functools.partial(stop.request, signals.CLOSED_OUTPUT))
    console.file = cast(IO[str], guarded)
    try:
        yield
    finally:
        console.file = file


def _train(
    params: Params,
    backend: Backend,
    logdir: Logdir,
    start: FirstWeights | None,
    stop: signals.StopRequest,
    console: rich.console.Console,
    progress: Progress,
    observers: Sequence[ObserverFactory],
) -> Outcome:
    """Builds the input, the task and the trainer, restores them, and trains."""
    say = functools.partial(_say, console)
    store = CheckpointStore(
        logdir.checkpoints, params.run.keep_checkpoints, say, before_commit=logdir.push
    )
    try:
        newest = store.peek()
        # Refuses batches that are too large for any step, before data is read.
        experiments.batch_specs(params)
        input_ = params.input.instantiate()
        first = newest or start
        if first:
            input_.load_vocabularies(first.extras)
        input_.progress = progress
        task = experiments.with_vocabulary_sizes(params.task, input_)
        progress.begin("Building the model")
        trainer = make_trainer(params, task)
        kept = (logdir.path / "programs", params.to_text()) if params.run.keep_programs else None
        runtime = checked(backend.make_runtime(trainer, kept), params.run.check_determinism_every)
        if backend.cluster.size > 1:
            input_.own_rows = runtime.own_rows
        checkpoint = snapshots.restore(snapshot_run(logdir), newest, runtime.abstract_state())
        kind = "snapshot" if checkpoint else "checkpoint"
        checkpoint = checkpoint or store.restore(runtime.abstract_state())
        if checkpoint and _is_done(params, checkpoint):
            return _finished(trainer, checkpoint.step, logdir, say)
        if checkpoint:
            say(f"Resuming from the {kind} of step {checkpoint.step:,}")
            _warn_of_new_schedule(console, params, checkpoint)
            logdir.write_params(params)
        if start and not checkpoint:
            checkpoint = start.checkpoint(trainer, runtime.abstract_state())
        print_summary(console, params, input_, trainer, runtime)
        step = checkpoint.step if checkpoint else 0
        record_launch(logdir, params, trainer, runtime, backend, step, say)
        split = backend.partitioning
        run = ObservedRun(
            params, trainer, runtime, split, input_, logdir, store, stop, step + 1, console
        )
        watching = [make(run) for make in observers]
        watching.append(HangWatch(params.run, backend.cluster.roll_call))
        outcome = TrainingLoop(run, watching).run(checkpoint, progress)
        for line in input_.usage_notes():
            say(line)
        return outcome
    finally:
        store.close()


def _is_done(params: Params, checkpoint: Checkpoint) -> bool:
    p, best = params.run, checkpoint.record.best
    is_early = best is not None and best.metric == p.keep_best and ends_training(p.patience, best)
    return checkpoint.step >= p.steps or is_early


def _starting_point(
    init_from: str | os.PathLike | None,
    logdir: Logdir,
    params: Params,
    console: rich.console.Console,
) -> FirstWeights | None:
    """Returns what gives the first weights of a new run: a run, a published model, or nothing."""
    say = functools.partial(_say, console)
    if not init_from or logdir.has_checkpoints():
        return None
    # A run that starts from nothing does not wait for published models.
    from lingvo_gshard.wings.open_models.starting import PublishedStart, is_published

    if is_published(init_from):
        return PublishedStart(init_from, params, say)
    return StartingPoint(init_from, params.task.cls, say)


def _finished(trainer: Trainer, step: int, logdir: Logdir, say: Callable[[str], None]) -> Outcome:
    """Returns the outcome of a run that took all its steps. Reports a loss that has diverged."""
    path = logdir.path / METRICS_FILE
    found = divergence.of_run(path, trainer.p, step, trainer.task.guessing_loss())
    for line in found.summary():
        say(line)
    return Outcome(step, True, None, diverged_since=found.since)


def _warn_of_new_schedule(
    console: rich.console.Console, params: Params, checkpoint: Checkpoint
) -> None:
    """Warns if a changed number of steps stretches or shortens the learning rate's schedule."""
    before = params_text.experiment_from_text(checkpoint.params_text).run.steps
    now = params.run.steps
    schedule = params.step.schedule
    if before != now and schedule.cls.ends_with_run(schedule):
        _say(
            console,
            f"Warning: the learning rate now decays until step {now:,}, not {before:,}. To keep "
            f"the earlier schedule, set step.schedule.total_steps = {before}",
        )


def _check_backend(
    backend: Backend, params: Params, options: RuntimeOptions, console: rich.console.Console
) -> None:
    """Checks the workers, and warns if the devices are of another kind than planned."""
    backend.check_workers(params)
    note = options.plan.note(backend.devices[0]) if options.plan else ""
    if note:
        _say(console, note)


def _say(console: rich.console.Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def record_launch(
    logdir: Logdir,
    params: Params,
    trainer: Trainer,
    runtime: DeviceRuntime,
    backend: Backend,
    step: int,
    say: Callable[[str], None],
) -> None:
    """Writes command, versions, devices and sharding into the run's directory.

    Only the main process writes. If it cannot, it says so, and the run goes on. `step` is the step
    that the run resumes from; 0 for a new run.
    """
    if not backend.is_main:
        return
    row = run_records.Launch(
        time=time.time(),
        step=step,
        steps=trainer.steps,
        experiment=params.name,
        command=run_records.command_line(),
        directory=run_records.directory(),
        host=platform.node(),
        processes=processes.count(),
        runtime=backend.kind,
        devices=runtime.device_summary,
        parameters=sum(math.prod(spec.shape) for spec in trainer.theta_specs.flatten()),
        active_parameters=active_parameters(trainer.task),
        versions=run_records.versions(),
        environment=run_records.settings(run_records.environment_at_start()),
    )
    earlier = run_records.read_launches(logdir.path)
    if step and earlier and earlier[-1].devices != row.devices:
        say(f"Until now the run had {earlier[-1].devices}; each start names its mesh and strategy")
    try:
        run_records.append_launch(logdir.path, row)
        run_records.write_sharding(
            logdir.path, run_records.trainer_sharding(trainer, backend.partitioning)
        )
    except OSError as error:
        say(f"Warning: how the run was started cannot be recorded ({error.strerror})")
