"""Flags that ask for a profile of some training steps."""

from __future__ import annotations

import rich.console
from absl import flags

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.run.observers.step_observer import ObserverFactory


def define_profile_flags(values: flags.FlagValues) -> None:
    """Defines the flags of a training run's profile."""
    flags.DEFINE_string(
        "profile_steps",
        None,
        "First and last step to profile, such as 20:23. Their trace and its summary are written "
        "to LOGDIR/profile (docs/profiling.md).",
        flag_values=values,
    )
    flags.DEFINE_string(
        "plan",
        None,
        "Plan of the step, written by gshard-plan --json, that the profile of --profile_steps is "
        "compared with. The ratios are written for gshard-plan --calibration.",
        flag_values=values,
    )


def profilers(
    values: flags.FlagValues, params: Params, console: rich.console.Console
) -> list[ObserverFactory]:
    """Returns what makes the profiler that the flags ask for; nothing if they ask for none.

    Raises:
      UserError: names --profile_steps if the run has no such steps, and --plan if it is not a
        plan of the experiment.
    """
    if values.profile_steps is None:
        if values.plan is not None:
            raise UserError(f"--plan={values.plan} applies to --profile_steps, which is not given")
        return []
    # Runs without a profile do not wait for these.
    from lingvo_gshard.profiling import steps
    from lingvo_gshard.profiling.comparison import load_plan
    from lingvo_gshard.profiling.observer import profile_steps
    from lingvo_gshard.tools.profile_reports.profile_report import print_result

    asked = steps.parse(values.profile_steps)
    steps.check_within(asked, params.run.steps)

    plan = None if values.plan is None else load_plan(values.plan, params.name)
    return [
        profile_steps(asked, lambda result: print_result(result, console), plan, values.plan or "")
    ]
