"""replay: computes a step of a run again, and says whether it is what the run recorded."""

from __future__ import annotations

import contextlib
import functools
import os

import rich.console

from lingvo_gshard.api.backend import Backend
from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.core import Params, UserError, params_text
from lingvo_gshard.training import (
    METRICS_FILE,
    Checkpoint,
    CheckpointStore,
    Logdir,
    MetricsRow,
    experiments,
    make_trainer,
    read_run,
    restored_state,
    steps_in,
)
from lingvo_gshard.wings.services import determinism as replaying
from lingvo_gshard.wings.services import run_records
from lingvo_gshard.wings.services.determinism import Replayed
from lingvo_gshard.wings.services.metrics_rows import rows_until
from lingvo_gshard.wings.services.roll_back import BatchesWithoutSkipped, RollBacks
from lingvo_gshard.wings.services.runtime import DeviceRuntime


def replay(
    logdir: str | os.PathLike,
    replay_step: int,
    *,
    options: RuntimeOptions | None = None,
    console: rich.console.Console | None = None,
) -> Replayed:
    """Computes a step of a run again, from the newest checkpoint before it.

    The run's directory is only read. Equal bits need the devices, mesh and strategy of the run.

    Args:
      logdir: the run's directory.
      replay_step: number of the step, from 1.
      options: where and how to run.
      console: shows what is done; None: standard output.

    Raises:
      UserError: the directory holds no run, no row of the step, or no checkpoint before it.
    """
    console, directory = console or rich.console.Console(), Logdir(logdir)
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    recorded = _recorded(directory, replay_step)
    checkpoints = steps_in(directory.checkpoints)
    params = _params_of_step(directory, checkpoints, replay_step)
    with Backend(options or RuntimeOptions(), params, str(logdir)) as backend:
        backend.cluster.logdir = directory
        backend.check_workers(params)
        console.quiet = console.quiet or not backend.is_main
        store = CheckpointStore(directory.checkpoints, say=say, writable=False)
        with contextlib.closing(store):
            runtime, checkpoint, batches = _prepare(params, directory, backend, store, replay_step)
            say(
                f"Replaying steps {checkpoint.step + 1:,} to {replay_step:,} from the checkpoint "
                f"of step {checkpoint.step:,}"
            )
            saved = None
            if replay_step in checkpoints:
                saved = read_run(directory.checkpoints / str(replay_step)).record
            found = Replayed(replay_step, checkpoint.step)
            with contextlib.closing(batches):
                replaying.replay(runtime, batches, recorded, found, saved)
        say(_verdict(found, directory, runtime))
    return found


def _recorded(directory: Logdir, step: int) -> dict[int, MetricsRow]:
    """Returns the rows that the run recorded up to the step after `step`."""
    recorded = dict(rows_until(directory.path / METRICS_FILE, step + 1))
    if step not in recorded:
        last = max(recorded, default=0)
        raise UserError(
            f"`replay_step={step}`: {directory.place / METRICS_FILE} has no row of this step; its "
            f"last row up to there is of step {last:,}"
        )
    return recorded


def _params_of_step(directory: Logdir, checkpoints: list[int], step: int) -> Params:
    """Returns the run's Params at a step, as the step's next checkpoint has saved them."""
    older = [one for one in checkpoints if one < step]
    if not older:
        kept = f"the oldest that was kept is of step {checkpoints[0]:,}" if checkpoints else ""
        raise UserError(
            f"`replay_step={step}`: {directory.checkpoints} holds no checkpoint before this step"
            + (f"; {kept}. run.keep_checkpoints says how many are kept" if kept else "")
        )
    for one in checkpoints:
        if one >= step:
            return params_text.experiment_from_text(
                read_run(directory.checkpoints / str(one)).params_text
            )
    return directory.read_params()


def _prepare(
    params: Params, directory: Logdir, backend: Backend, store: CheckpointStore, step: int
) -> tuple[DeviceRuntime, Checkpoint, BatchesWithoutSkipped]:
    """Returns a runtime with the state before a step, its checkpoint, and the batches after it."""
    newest = store.peek()
    assert newest is not None
    input_ = params.input.instantiate()
    input_.load_vocabularies(newest.extras)
    trainer = make_trainer(params, experiments.with_vocabulary_sizes(params.task, input_))
    runtime = backend.make_runtime(trainer)
    abstract_state = runtime.abstract_state()
    checkpoint = store.restore(abstract_state, before=step)
    if checkpoint is None:
        raise UserError(f"{directory.checkpoints}: no checkpoint before step {step:,} is readable")
    input_.check_split("train")
    runtime.load_state(restored_state(trainer, checkpoint, abstract_state))
    skipped = RollBacks(trainer.p.spikes, directory.path, checkpoint.step).skipped
    batches = BatchesWithoutSkipped(input_.train_batches(trainer.p.seed), skipped)
    if checkpoint.position is not None:
        batches.set_state(checkpoint.position)
        batches.go_on_after(checkpoint.step, skipped)
    checkpoint.arrays.clear()
    return runtime, checkpoint, batches


def _verdict(found: Replayed, directory: Logdir, runtime: DeviceRuntime) -> str:
    if found.is_equal:
        return f"step {found.step:,} is equal to what the run recorded, in every bit: " + ", ".join(
            found.compared
        )
    text = f"step {found.differs_at:,} differs from what the run recorded: " + "; ".join(
        found.differences
    )
    others = _other_machine(directory, found.step, runtime)
    return f"{text}. {others}" if others else text


def _other_machine(directory: Logdir, step: int, runtime: DeviceRuntime) -> str:
    """Returns how this machine differs from the one that took a step; '' if it is not known to."""
    launches = [one for one in run_records.read_launches(directory.path) if one.step < step]
    if not launches:
        return ""
    then, now = launches[-1], run_records.versions()
    wrong = [
        f"{name} {then.versions.get(name)} then, {version} now"
        for name, version in now.items()
        if then.versions.get(name) != version
    ]
    if then.devices != runtime.device_summary:
        wrong.insert(0, f"{then.devices} then, {runtime.device_summary} now")
    return f"The bits may differ for another reason: {'; '.join(wrong)}" if wrong else ""
