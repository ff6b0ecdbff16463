"""Trains an experiment, or goes on with one.

    gshard-train --list
    gshard-train --experiment=translation.quickstart --logdir=runs/quickstart

The same command goes on from the newest checkpoint in --logdir, with the same result as a run that
was never interrupted. Ctrl-C finishes the step, saves and leaves. Every hyperparameter is set by
its dotted path:

    gshard-train --experiment=translation.quickstart --logdir=runs/small \\
        --steps=500 --gin_param="trainer.schedule.learning_rate = 0.002"

Of a run that has a checkpoint --logdir is enough: its Params are in it.

    gshard-train --logdir=runs/small --steps=1000

The same model, partitioned over a mesh of devices, its experts over all of them:

    gshard-train --experiment=translation.quickstart --logdir=runs/sharded \\
        --runtime=spmd --mesh=data=8 --strategy=expert

--logdir then holds params.txt (every hyperparameter), metrics.jsonl (a row for each step), events/
(for `tensorboard --logdir`) and checkpoints/.
"""

from __future__ import annotations

import sys

import rich.console
from absl import flags

from lingvo_gshard.core.config import gin_binding, registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.runtime import allocator
from lingvo_gshard.tools.console import startup, summary
from lingvo_gshard.tools.flags import runtime as runtime
from lingvo_gshard.tools.flags.experiment import define_experiment_flags, experiment_params
from lingvo_gshard.training.checkpoint.store import Checkpoint, CheckpointStore
from lingvo_gshard.training.experiments import with_vocabulary_sizes
from lingvo_gshard.training.logdir import Logdir
from lingvo_gshard.training.loop import Loop, Outcome
from lingvo_gshard.training.monitoring.diagnosis import NonFiniteError
from lingvo_gshard.training.params_text import experiment_from_text
from lingvo_gshard.training.signals import StoppedError, StopRequest

NAME = "gshard-train"


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()
    define_experiment_flags(values)
    flags.DEFINE_string("logdir", None, "Directory of the run; made if new.", flag_values=values)
    flags.DEFINE_integer(
        "steps", None, "Steps to train in all; sets trainer.steps.", 1, flag_values=values
    )
    flags.DEFINE_integer("seed", None, "Sets trainer.seed.", flag_values=values)
    runtime.define_runtime_flags(values)
    flags.DEFINE_boolean("list", False, "Lists the experiments and exits.", flag_values=values)
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    allocator.keep_pages()
    values = define_flags()
    startup.parse_flags(values, argv, __doc__)
    console = rich.console.Console()
    if values.list:
        _list_experiments(console)
        return 0
    params = _params(values)
    if not values.logdir:
        raise ValueError("--logdir is missing: the directory for checkpoints and metrics")
    logdir = Logdir(values.logdir)
    command = startup.command_line(NAME, argv)
    try:
        with StopRequest() as stop, runtime.Launch(values, params) as launch:
            launch.cluster.logdir = logdir
            launch.check_workers(params)
            console = rich.console.Console(quiet=not launch.is_main)
            logdir.claim(params)
            outcome = train(params, launch, logdir, stop, console)
    except StoppedError as stopped:
        _say(console, f"{stopped}: stopped before the first step. Start again with:\n  {command}")
        return 0
    except NonFiniteError as error:
        if launch.is_main:
            print(f"{NAME}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _say(console, f"Left without saving. Go on from the last checkpoint with:\n  {command}")
        return 130
    _print_outcome(console, outcome, logdir, command)
    return 0


def train(
    params: Params,
    launch: runtime.Launch,
    logdir: Logdir,
    stop: StopRequest,
    console: rich.console.Console,
) -> Outcome:
    """Builds the input, the task and the trainer of an experiment, and trains."""
    store = CheckpointStore(logdir.checkpoints, params.trainer.keep_checkpoints)
    try:
        newest = store.peek()
        input_ = params.input.instantiate()
        if newest:
            input_.load_vocabularies(newest.extras)
        trainer = params.trainer.instantiate(with_vocabulary_sizes(params.task, input_))
        runtime = launch.runtime(trainer)
        checkpoint = store.restore(runtime.abstract_state())
        if checkpoint:
            _say(console, f"Going on from the checkpoint of step {checkpoint.step:,}")
            _warn_of_another_end(console, params, checkpoint)
        summary.print_summary(console, params, input_, trainer, runtime)
        loop = Loop(params, trainer, runtime, input_, logdir, store, stop, console)
        return loop.run(checkpoint)
    finally:
        store.close()


def _params(values: flags.FlagValues) -> Params:
    params = _params_of_the_run(values) or experiment_params(values)
    for name in ("steps", "seed"):
        if values[name].value is not None:
            params.trainer.set(**{name: values[name].value})
    return params


def _params_of_the_run(values: flags.FlagValues) -> Params | None:
    """The Params of the run in --logdir, where there is one and no experiment is named."""
    if values.experiment or not values.logdir or not Logdir(values.logdir).has_checkpoints():
        return None
    saved = Logdir(values.logdir).read_params()
    return gin_binding.apply_gin(saved, values.gin_file, values.gin_param)


def _warn_of_another_end(
    console: rich.console.Console, params: Params, checkpoint: Checkpoint
) -> None:
    """Says so where other --steps than before stretch the schedule."""
    before, now = experiment_from_text(checkpoint.params_text).trainer.steps, params.trainer.steps
    schedule = params.trainer.schedule
    if before != now and "total_steps" in schedule and not schedule.total_steps:
        _say(
            console,
            f"Warning: the learning rate now decays to step {now:,}, before it was {before:,}; "
            f"trainer.schedule.total_steps = {before} keeps it",
        )


def _list_experiments(console: rich.console.Console) -> None:
    for name in registry.names():
        _say(console, f"{name}\n    {registry.describe(name).splitlines()[0]}")


def _print_outcome(
    console: rich.console.Console, outcome: Outcome, logdir: Logdir, command: str
) -> None:
    if outcome.finished:
        _say(console, f"Trained {outcome.step:,} steps; the run is in {logdir.path}")
        _say(console, "A larger --steps trains longer.")
    else:
        _say(console, f"{outcome.signal}: saved at step {outcome.step:,}. Go on with:\n  {command}")


def _say(console: rich.console.Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
