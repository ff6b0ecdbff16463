"""The flags that name a trained run and its checkpoint."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.run.checkpoint.choice import BEST


def define_logdir_flag(values: flags.FlagValues) -> None:
    """Defines --logdir, the directory of a trained run."""
    flags.DEFINE_string(
        "logdir",
        None,
        "Directory that gshard-train wrote, on a disk or in a bucket (gs://, s3://).",
        flag_values=values,
    )


def define_checkpoint_flag(values: flags.FlagValues) -> None:
    """Defines --checkpoint, which checkpoint of the run is read."""
    flags.DEFINE_string(
        "checkpoint",
        BEST,
        "Which checkpoint is read: best, as run.keep_best measures it, which is the newest "
        "without that; newest; or its step.",
        flag_values=values,
    )


def required_logdir(values: flags.FlagValues) -> str:
    """Returns --logdir; ValueError if it is not given."""
    if not values.logdir:
        raise UserError("--logdir is missing: the directory that gshard-train wrote")
    return values.logdir
