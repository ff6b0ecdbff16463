"""The flag that names a trained run."""

from __future__ import annotations

from absl import flags


def define_logdir_flag(values: flags.FlagValues) -> None:
    """Defines --logdir, the directory of a trained run."""
    flags.DEFINE_string("logdir", None, "Directory that gshard-train wrote.", flag_values=values)


def required_logdir(values: flags.FlagValues) -> str:
    """Returns --logdir; ValueError if it is not given."""
    if not values.logdir:
        raise ValueError("--logdir is missing: the directory that gshard-train wrote")
    return values.logdir
