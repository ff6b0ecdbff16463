"""Flags of gshard-plan --loads, and what they ask for."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.loads.given import LoadsOptions
from lingvo_gshard.tools.flags.options import read_options

# Flags of plans without a training step of an experiment.
_NOT_HERE = ("generate", "search", "budget", "plan")


def check_loads_flags(values: flags.FlagValues) -> None:
    """Raises UserError if --loads is mixed with plans of anything but a training step."""
    read_options(values, LoadsOptions)
    if values.loads is None:
        return
    for name in _NOT_HERE:
        if values[name].value:
            raise UserError(
                f"--loads={values.loads} does not apply to --{name}={values[name].value}: it is "
                "for the training step of an experiment"
            )
