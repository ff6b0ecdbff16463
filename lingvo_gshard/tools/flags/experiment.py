"""Flags that name an experiment and change its Params."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core.config.params import Params


def define_experiment_flags(values: flags.FlagValues) -> None:
    """Defines --experiment, --gin_file and --gin_param."""
    flags.DEFINE_string(
        "experiment",
        None,
        "Name of the experiment; gshard-train --list shows those of the package. An experiment of "
        "your own is named by its module, such as my_package.my_module.my_experiment; modules in "
        "the current directory are found.",
        flag_values=values,
    )
    define_settings_flags(values)


def define_settings_flags(values: flags.FlagValues) -> None:
    """Defines --gin_file and --gin_param."""
    flags.DEFINE_multi_string(
        "gin_file",
        [],
        "Gin file with settings, or the params.txt of a run; may be repeated.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "gin_param",
        [],
        "One setting, such as 'step.clip_norm = 1.0'; may be repeated.",
        flag_values=values,
    )


def experiment_params(values: flags.FlagValues) -> Params:
    """Returns the experiment's Params with all settings; ValueError if a name is wrong."""
    return experiment(values.experiment or "", values.gin_param, values.gin_file)
