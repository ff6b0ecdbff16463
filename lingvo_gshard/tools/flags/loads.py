"""Flags of gshard-plan --loads, and what they ask for."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.loads.given import LoadsOptions

# Flags of plans without a training step of an experiment.
_NOT_HERE = ("generate", "search", "budget", "plan")


def define_loads_flags(values: flags.FlagValues) -> None:
    """Defines --loads and the flags that only apply to it."""
    flags.DEFINE_string(
        "loads",
        None,
        "Loads that the routers of a run had, to plan with: a file of gshard-experts report --json "
        "or of gshard-experts watched --json, or the run's routers.jsonl. The plan then says which "
        "device is the slowest, what is dropped, and how to place experts.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "loads_from",
        0,
        "First step of --loads to take; those before it are left out.",
        0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "replicas",
        0,
        "Further copies of experts in each layer that the placement for --loads has.",
        0,
        flag_values=values,
    )


def check_loads_flags(values: flags.FlagValues) -> None:
    """Raises ValueError if --loads is mixed with plans of anything but a training step."""
    loads_options(values).check()
    if values.loads is None:
        return
    for name in _NOT_HERE:
        if values[name].value:
            raise UserError(
                f"--loads={values.loads} does not apply to --{name}={values[name].value}: it is "
                "for the training step of an experiment"
            )


def loads_options(values: flags.FlagValues) -> LoadsOptions:
    """Returns the options that the flags give."""
    return LoadsOptions(values.loads, values.loads_from, values.replicas)
