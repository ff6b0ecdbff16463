"""Flags that ask for a profile of some training steps."""

from __future__ import annotations

import rich.console
from absl import flags

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.profiling import steps
from lingvo_gshard.profiling.files import ProfileFiles
from lingvo_gshard.profiling.observer import profile_steps
from lingvo_gshard.profiling.profile import Profile
from lingvo_gshard.tools.profile_reports.profile_report import print_files, print_profile
from lingvo_gshard.training.observers.step_observer import ObserverFactory


def define_profile_flags(values: flags.FlagValues) -> None:
    """Defines the flags of a training run's profile."""
    flags.DEFINE_string(
        "profile_steps",
        None,
        "First and last step to profile, such as 20:23. Their trace and its summary are written "
        "to LOGDIR/profile (docs/profiling.md).",
        flag_values=values,
    )


def profilers(
    values: flags.FlagValues, params: Params, console: rich.console.Console
) -> list[ObserverFactory]:
    """Returns what makes the profiler that the flags ask for; nothing if they ask for none.

    Raises:
      ValueError: names --profile_steps if the run has no such steps.
    """
    if values.profile_steps is None:
        return []
    asked = steps.parse(values.profile_steps)
    steps.check_within(asked, params.trainer.steps)

    def report(profile: Profile, files: ProfileFiles) -> None:
        print_profile(profile, console)
        print_files(files, console)

    return [profile_steps(asked, report)]
