"""Flags and results that the benchmarks share."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.tools.benchmarks import common
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import define, make_flags

numbers, write = common.numbers, common.write


def define_flags(experiment: bool = True) -> flags.FlagValues:
    """Returns --json, and --experiment and --repeats if a benchmark measures an experiment."""
    values = make_flags(json=output.json_flag())
    if experiment:
        define(values, repeats=common.REPEATS, experiment=common.EXPERIMENT)
    return values


def define_integer(values: flags.FlagValues, name: str, default: int, help: str) -> None:
    """Defines a flag whose value is 1 or more."""
    flags.DEFINE_integer(name, default, help, 1, flag_values=values)
