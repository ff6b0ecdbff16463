"""Flags that name an experiment or a trained run, and say where and how it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from absl import flags

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.core import Params, UserError
from lingvo_gshard.tools.console import Console
from lingvo_gshard.tools.flags.definitions import Definition, Flags, comma_list, repeated, string
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.training import BEST, ObserverFactory
from lingvo_gshard.wings.cluster.member import ClusterOptions
from lingvo_gshard.wings.inference.decoding.precision import PRECISIONS, TRAINED

if TYPE_CHECKING:
    from lingvo_gshard.wings.planning.planned_training import PlannedTraining


# The directory of a trained run, and which of its checkpoints is read.
LOGDIR = "Directory that gshard-train wrote, on a disk or in a bucket (gs://, s3://)."
CHECKPOINT = string(
    "Which checkpoint is read: best, as run.keep_best measures it, which is the newest without "
    "that; newest; or its step.",
    BEST,
)
SETTINGS: Flags = {
    "gin_file": repeated(
        "Gin file with settings, or the params.txt of a run; may be repeated.", []
    ),
    "gin_param": repeated(
        "One setting, such as 'step.clip_norm = 1.0'; may be repeated. --step.clip_norm=1.0 is the "
        "same.",
        [],
    ),
}
EXPERIMENT: Flags = {
    "experiment": "Name of the experiment; gshard-train --list shows those of the package. An "
    "experiment of your own is named by its module, such as "
    "my_package.my_module.my_experiment; modules in the current directory are found.",
    **SETTINGS,
}
IGNORE_KEYS = comma_list(
    "Keys of config.json that do not change what the model computes, though its family does not "
    "know them; with commas between them.",
    [],
)
PROFILE_STEPS = (
    "First and last step to profile, such as 20:23. Their trace and its summary are written to "
    "LOGDIR/profile (docs/profiling.md)."
)


def required_logdir(values: flags.FlagValues) -> str:
    """Returns --logdir; ValueError if it is not given."""
    if not values.logdir:
        raise UserError("--logdir is missing: the directory that gshard-train wrote")
    return values.logdir


def experiment_params(values: flags.FlagValues) -> Params:
    """Returns the experiment's Params with all settings; ValueError if a name is wrong."""
    return experiment(values.experiment or "", values.gin_param, values.gin_file)


def profilers(
    values: flags.FlagValues, params: Params, planned: PlannedTraining | None, console: Console
) -> list[ObserverFactory]:
    """Returns what makes the profiler that the flags ask for; nothing if they ask for none.

    Raises:
      UserError: names --profile_steps if the run has no such steps, and --plan if the plan cannot
        be compared.
    """
    if values.profile_steps is None:
        return []
    # Runs without a profile do not wait for these.
    from lingvo_gshard.tools.profile_reports.profile_report import print_result
    from lingvo_gshard.wings.profiling import timeline
    from lingvo_gshard.wings.profiling.comparison import check_comparable
    from lingvo_gshard.wings.profiling.observer import profile_steps

    asked = timeline.parse(values.profile_steps)
    timeline.check_within(asked, params.run.steps)

    plan = planned.plan if planned else None
    if planned is not None:
        check_comparable(plan, str(planned))
    return [
        profile_steps(asked, lambda result: print_result(result, console), plan, values.plan or "")
    ]


def runtime_flags(in_cluster: bool = True) -> Flags:
    """Returns the flags of `RuntimeOptions`, and of `ClusterOptions` if it may run in a cluster."""
    cluster = option_flags(ClusterOptions()) if in_cluster else {}
    return option_flags(RuntimeOptions()) | cluster


def runtime_options(
    values: flags.FlagValues, plan: PlannedTraining | None = None
) -> RuntimeOptions:
    """Returns the options that the flags of `runtime_flags` give."""
    cluster = read_options(values, ClusterOptions) if "coordinator" in values else None
    return read_options(values, RuntimeOptions, cluster=cluster, plan=plan)


def precision_flag(default: str | None = TRAINED) -> Definition:
    """Returns --precision, which says how weights are stored and multiplied."""
    return string(
        "How the weights are stored and multiplied: trained, as in training; int8, with a quarter "
        "of the memory and faster products; int8_weights, stored as int8 and multiplied as in "
        "training, which is more exact and slower.",
        default,
        PRECISIONS,
    )
