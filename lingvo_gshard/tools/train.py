"""Trains an experiment, or resumes one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags

from lingvo_gshard.api.experiments import apply_settings, describe, experiments
from lingvo_gshard.api.training import train
from lingvo_gshard.core import EXIT_CODES, Params, UserError, processes, signals
from lingvo_gshard.runtime import devices
from lingvo_gshard.tools.console import output, startup, warn
from lingvo_gshard.tools.flags import run
from lingvo_gshard.tools.flags.definitions import comma_list, integer, maker, refuse, switch
from lingvo_gshard.tools.flags.planned import plan_flag, planned_training, requested_params
from lingvo_gshard.training import Logdir, Outcome
from lingvo_gshard.wings.cluster.worker_report import REPORT_FILE

if TYPE_CHECKING:
    from lingvo_gshard.wings.planning.planned_training import PlannedTraining

# Flags that change a run, and so cannot be given with --replay_step.
_CHANGES = (
    *("experiment", "plan", "gin_param", "gin_file", "init_from", "steps", "seed"),
    "check_determinism_every",
)


def replay_step(values: flags.FlagValues, console: output.Console) -> int:
    """Computes --replay_step again. Returns 0 if it is equal to what was recorded, else 2."""
    if not values.logdir:
        raise UserError("--logdir is missing: the directory of the run to replay")
    why = f"cannot be combined with --replay_step={values.replay_step}"
    refuse(values, _CHANGES, f"{why}: a run is replayed with its own Params")
    # Training does not wait for what a replay needs.
    from lingvo_gshard.api.replay import replay

    found = replay(
        values.logdir, values.replay_step, options=run.runtime_options(values), console=console
    )
    if processes.is_main():
        record = {"logdir": values.logdir, **dataclasses.asdict(found)}
        output.write_json(values.json, {**record, "is_equal": found.is_equal})
    return 0 if found.is_equal else 2


NAME = "gshard-train"

define_flags = maker(
    **run.EXPERIMENT,
    plan=plan_flag(
        "With --profile_steps, the profile is compared with the plan, and the ratios are "
        "written for gshard-plan --calibration."
    ),
    logdir="Directory of the run, on a disk or in a bucket (gs://, s3://); created if it is new.",
    init_from="Directory of a run whose best or newest weights this run starts with, or of a "
    "published model. Without --experiment, its Params are the defaults.",
    steps=integer("Total number of steps; sets run.steps.", least=1),
    seed=integer("Sets step.seed."),
    writer=comma_list(
        "Services that get the rows of metrics.jsonl as well: wandb, mlflow, or both, "
        "separated by a comma. Sets run.writers."
    ),
    **run.runtime_flags(),
    check_determinism_every=integer(
        "Computes every so many-th step twice and compares all bits; 0: none. Sets "
        "run.check_determinism_every.",
        least=0,
    ),
    replay_step=integer(
        "Trains nothing: computes this step of the run in --logdir again, from the checkpoint "
        "before it, and compares it with what the run recorded.",
        least=1,
    ),
    profile_steps=run.PROFILE_STEPS,
    json=output.json_flag("how training ended, or what --list shows,"),
    list=switch("Lists the experiments and exits."),
    params="Prints the hyperparameters as gin, with their meaning, and exits. With a value "
    "only those whose path contains it, or matches it if it has wildcards, such as "
    "'trainer.*'.",
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    devices.keep_pages()
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    output.check_writable(values, "json")
    console = output.make_console(values.json)
    if values.list:
        for name, purpose in experiments().items():
            console.say(f"{name}\n    {purpose}")
        output.write_json(values.json, experiments())
        return 0
    if values.replay_step is not None:
        return replay_step(values, console)
    planned = planned_training(values)
    params = _params(values, planned, console.say)
    if values.params is not None:
        print(describe(params, values.params), end="")
        return 0
    if not values.logdir:
        raise UserError("--logdir is missing: the directory for checkpoints and metrics")
    command = startup.command_line(NAME, argv)
    try:
        outcome = train(
            params,
            values.logdir,
            init_from=values.init_from,
            options=run.runtime_options(values, planned),
            console=console,
            observers=run.profilers(values, params, planned, console),
        )
    except signals.TrainingFailedError as error:
        if processes.is_main():
            warn(f"{NAME}: error: {error}")
        return 1
    except KeyboardInterrupt:
        console.say(f"Stopped without saving. Continue from the last checkpoint:\n  {command}")
        return EXIT_CODES["Ctrl-C"]
    _print_outcome(console, outcome, params, Logdir(values.logdir), command)
    if processes.is_main():
        record = {"logdir": values.logdir, "experiment": params.name}
        output.write_json(values.json, record | dataclasses.asdict(outcome))
    if outcome.diverged_since is None:
        return 0 if outcome.finished else EXIT_CODES[outcome.signal or "Ctrl-C"]
    if processes.is_main():
        message = f"the loss diverged at step {outcome.diverged_since:,}; see the warning above"
        warn(f"{NAME}: error: {message}")
    return 1


def _params(
    values: flags.FlagValues, planned: PlannedTraining | None, say: Callable[[str], object]
) -> Params:
    params = _saved_params(values) or requested_params(values, planned, say)
    if values.seed is not None:
        params.step.seed = values.seed
    for name in ("steps", "check_determinism_every"):
        if values[name].value is not None:
            params.run.set(**{name: values[name].value})
    if values.writer is not None:
        params.run.writers = tuple(values.writer)
    return params


def _saved_params(values: flags.FlagValues) -> Params | None:
    """Returns the Params of the run in --logdir or --init_from with settings; None without one."""
    if values.experiment or values.plan:
        return None
    if values.logdir and Logdir(values.logdir).has_checkpoints():
        saved = Logdir(values.logdir).read_params()
    elif values.init_from:
        # A run that starts from nothing does not wait for published models.
        from lingvo_gshard.api.importing import open_model
        from lingvo_gshard.wings.fine_tuning.starting import params_of
        from lingvo_gshard.wings.open_models.starting import is_published

        published = is_published(values.init_from)
        saved = open_model(values.init_from) if published else params_of(values.init_from)
    else:
        return None
    return apply_settings(saved, values.gin_param, values.gin_file)


def _print_outcome(
    console: output.Console, outcome: Outcome, params: Params, logdir: Logdir, command: str
) -> None:
    step = f"{outcome.step:,}"
    if outcome.signal == signals.CLOSED_OUTPUT:
        console = output.Console(stderr=True)
    if outcome.finished and not outcome.metrics:
        steps = f"{params.run.steps:,}"
        console.say(
            f"Nothing to do: the run in {logdir.place} has {step} steps already, and run.steps "
            f"is {steps}. To train longer, give a larger --steps."
        )
    elif outcome.finished:
        console.say(f"Trained {step} steps; the run is in {logdir.place}")
        console.say("To train longer, give a larger --steps.")
    elif outcome.metrics and REPORT_FILE in os.environ:
        console.say(f"{outcome.signal}: saved at step {step}; the agents go on from there")
    elif outcome.metrics:
        console.say(f"{outcome.signal}: saved at step {step}. Continue with:\n  {command}")
    else:
        console.say(f"{outcome.signal}: stopped before the first step. Run again:\n  {command}")
