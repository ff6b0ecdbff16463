"""The flags of studies that train, and the training of their runs one by one."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import define
from lingvo_gshard.tools.flags.run import SETTINGS
from studies.member import Member

ADAM = "step.optimizer = @lingvo_gshard.training.step.adam.Adam"


def define_study_flags(values: flags.FlagValues, seeds: Sequence[str]) -> None:
    """Defines --folder, --seeds, --steps, --train, the settings of experiments, and --json.

    Args:
      values: the flags of the command.
      seeds: the default of --seeds.
    """
    flags.DEFINE_string("folder", None, "Directory of the study's runs.", flag_values=values)
    flags.DEFINE_list("seeds", list(seeds), "Seeds to train with.", flag_values=values)
    flags.DEFINE_integer(
        "steps", None, "Steps of each run; default: the experiment's.", 1, flag_values=values
    )
    flags.DEFINE_boolean(
        "train", True, "Whether to train and score what is missing.", flag_values=values
    )
    define(values, **SETTINGS, json=output.json_flag("all scores"))


def folder_of(values: flags.FlagValues) -> pathlib.Path:
    """Returns the directory of the study's runs; UserError if none is given."""
    if not values.folder:
        raise UserError("--folder is missing: the directory of the study's runs")
    return pathlib.Path(values.folder)


def seeds_of(flag: str, texts: Sequence[str]) -> list[int]:
    """Returns the seeds that a flag gives; UserError if one is none."""
    for text in texts:
        if not text.isdecimal():
            raise UserError(f"--{flag}: {text!r} is no seed; numbers such as 1,2 were expected")
    return list(map(int, texts))


def check(members: Sequence[Member]) -> None:
    """Raises UserError for a wrong name or setting, before the first run is trained."""
    for member in members:
        member.params()


def completed(
    members: Sequence[Member], values: flags.FlagValues, console: output.Console
) -> list[Member]:
    """Trains and scores the runs that are missing, unless --notrain. Returns the scored ones."""
    missing = [member for member in members if not member.is_scored]
    if values.train:
        for number, member in enumerate(missing, start=1):
            console.say(f"{member.name}: run {number} of {len(missing)}")
            member.train()
            member.score()
    return [member for member in members if member.is_scored]
