"""Trains an experiment, or goes on with one.

    gshard-train --list
    gshard-train --experiment=translation.quickstart --logdir=runs/quickstart

The same command goes on from the newest checkpoint in --logdir, with the same result as a run that
was never interrupted. Ctrl-C finishes the step, saves and leaves. Every hyperparameter is set by
its dotted path:

    gshard-train --experiment=translation.quickstart --logdir=runs/small \\
        --steps=500 --gin_param="trainer.schedule.learning_rate = 0.002"

--logdir then holds params.txt (every hyperparameter), metrics.jsonl (a row for each step), events/
(for `tensorboard --logdir`) and checkpoints/.
"""

from __future__ import annotations

import sys

from absl import flags

from lingvo_gshard.tools import _start

_start.quiet_tensorflow()

import rich.console  # noqa: E402

from lingvo_gshard import params as experiments  # noqa: E402, F401
from lingvo_gshard.core import gin_binding, names, registry  # noqa: E402
from lingvo_gshard.core.params import Params  # noqa: E402
from lingvo_gshard.runtime.local import LocalRuntime  # noqa: E402
from lingvo_gshard.tools import _summary  # noqa: E402
from lingvo_gshard.training.checkpoint import Checkpoint, CheckpointStore  # noqa: E402
from lingvo_gshard.training.diagnosis import NonFiniteError  # noqa: E402
from lingvo_gshard.training.logdir import Logdir  # noqa: E402
from lingvo_gshard.training.loop import Loop, Outcome  # noqa: E402
from lingvo_gshard.training.params_text import experiment_from_text  # noqa: E402
from lingvo_gshard.training.signals import StoppedError, StopRequest  # noqa: E402

NAME = "gshard-train"
RUNTIMES = {"local": LocalRuntime}


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        "experiment", None, "Name of the experiment; --list shows them.", flag_values=values
    )
    flags.DEFINE_string("logdir", None, "Directory of the run; made if new.", flag_values=values)
    flags.DEFINE_integer(
        "steps", None, "Steps to train in all; sets trainer.steps.", 1, flag_values=values
    )
    flags.DEFINE_integer("seed", None, "Sets trainer.seed.", flag_values=values)
    flags.DEFINE_multi_string(
        "gin_file",
        [],
        "A gin file over the experiment's Params",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "gin_param",
        [],
        "One setting, as 'trainer.clip_norm = 1.0'",
        flag_values=values,
    )
    flags.DEFINE_string("runtime", "local", "What runs the steps: local.", flag_values=values)
    flags.DEFINE_boolean("list", False, "Lists the experiments and exits.", flag_values=values)
    return values


def main(argv: list[str]) -> int:
    """Runs the program; returns the exit code. ValueError for a user's mistake."""
    values = define_flags()
    _start.parse_flags(values, argv, __doc__)
    console = rich.console.Console()
    if values.list:
        _list_experiments(console)
        return 0
    params = _params(values)
    if values.runtime not in RUNTIMES:
        hint = names.nearest(values.runtime, RUNTIMES)
        raise ValueError(f"--runtime={values.runtime} is unknown. {hint}")
    if not values.logdir:
        raise ValueError("--logdir is missing: the directory for checkpoints and metrics")
    logdir = Logdir(values.logdir)
    logdir.claim(params)
    command = _start.command_line(NAME, "lingvo_gshard.tools.train", argv)
    with StopRequest() as stop:
        try:
            outcome = train(params, RUNTIMES[values.runtime], logdir, stop, console)
        except StoppedError as stopped:
            print(f"{stopped}: stopped before the first step. Start again with:\n  {command}")
            return 0
        except NonFiniteError as error:
            print(f"{NAME}: error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"Left without saving. Go on from the last checkpoint with:\n  {command}")
            return 130
    _print_outcome(outcome, logdir, command)
    return 0


def train(
    params: Params,
    runtime_class: type,
    logdir: Logdir,
    stop: StopRequest,
    console: rich.console.Console,
) -> Outcome:
    """Builds the input, the task and the trainer of an experiment, and trains."""
    store = CheckpointStore(logdir.checkpoints, params.trainer.keep_checkpoints)
    try:
        checkpoint = store.restore()
        input_ = params.input.instantiate()
        if checkpoint:
            print(f"Going on from the checkpoint of step {checkpoint.step:,}")
            _warn_of_another_end(params, checkpoint)
            input_.load_vocabularies(checkpoint.extras)
        task = with_vocabulary_sizes(params.task, input_).instantiate()
        trainer = params.trainer.instantiate(task)
        runtime = runtime_class(trainer)
        _summary.print_summary(console, params, input_, trainer, runtime)
        loop = Loop(params, trainer, runtime, input_, logdir, store, stop, console)
        return loop.run(checkpoint)
    finally:
        store.close()


def with_vocabulary_sizes(task: Params, input_: object) -> Params:
    """Returns the task's Params with the input's vocabulary sizes where they are 0."""
    task = task.copy()
    for side in ("source", "target"):
        name = f"{side}_vocabulary_size"
        if name in task and not task.get(name):
            task.set_path(name, getattr(input_, f"{side}_vocabulary").size)
    return task


def run() -> None:
    """The console script."""
    _start.run_program(NAME, main)


def _params(values: flags.FlagValues) -> Params:
    if not values.experiment:
        raise ValueError("--experiment is missing; --list shows the experiments")
    params = registry.get(values.experiment)
    params = gin_binding.apply_gin(params, values.gin_file, values.gin_param)
    for name in ("steps", "seed"):
        if values[name].value is not None:
            params.trainer.set(**{name: values[name].value})
    return params


def _warn_of_another_end(params: Params, checkpoint: Checkpoint) -> None:
    """Says so where other --steps than before stretch the schedule."""
    before, now = experiment_from_text(checkpoint.params_text).trainer.steps, params.trainer.steps
    schedule = params.trainer.schedule
    if before != now and "total_steps" in schedule and not schedule.total_steps:
        print(
            f"Warning: the learning rate now decays to step {now:,}, before it was {before:,}; "
            f"trainer.schedule.total_steps = {before} keeps it"
        )


def _list_experiments(console: rich.console.Console) -> None:
    for name in registry.names():
        first_line = registry.describe(name).splitlines()[0]
        console.print(f"{name}\n    {first_line}", markup=False, highlight=False, soft_wrap=True)


def _print_outcome(outcome: Outcome, logdir: Logdir, command: str) -> None:
    if outcome.finished:
        print(f"Trained {outcome.step:,} steps; the run is in {logdir.path}")
        print("A larger --steps trains longer.")
    else:
        print(f"{outcome.signal}: saved at step {outcome.step:,}. Go on with:\n  {command}")


if __name__ == "__main__":
    run()
