"""The flags that name an experiment and change its Params."""

from __future__ import annotations

from absl import flags

from lingvo_gshard import params as experiments  # noqa: F401
from lingvo_gshard.core.config import gin_binding, registry
from lingvo_gshard.core.config.params import Params


def define_experiment_flags(values: flags.FlagValues) -> None:
    """Adds the flags that name an experiment and change its Params."""
    flags.DEFINE_string(
        "experiment",
        None,
        "Name of the experiment; gshard-train --list shows them.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "gin_file", [], "A gin file over the experiment's Params", flag_values=values
    )
    flags.DEFINE_multi_string(
        "gin_param", [], "One setting, as 'trainer.clip_norm = 1.0'", flag_values=values
    )


def experiment_params(values: flags.FlagValues) -> Params:
    """Returns the experiment's Params with what the gin flags set; ValueError for a wrong name."""
    if not values.experiment:
        raise ValueError("--experiment is missing; gshard-train --list shows the experiments")
    params = registry.get(values.experiment)
    return gin_binding.apply_gin(params, values.gin_file, values.gin_param)
