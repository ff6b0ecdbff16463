"""Flags and results that the benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import make_flags


def define_flags(experiment: bool = True) -> flags.FlagValues:
    """Returns --json, and --experiment and --repeats if a benchmark measures an experiment."""
    values = make_flags(json=output.json_flag())
    if experiment:
        define_integer(values, "repeats", 10, "Number of measurements.")
        flags.DEFINE_string(
            "experiment",
            "translation.quickstart",
            "The experiment whose model is measured.",
            flag_values=values,
        )
    return values


def define_integer(values: flags.FlagValues, name: str, default: int, help: str) -> None:
    """Defines a flag whose value is 1 or more."""
    flags.DEFINE_integer(name, default, help, 1, flag_values=values)


def write(values: flags.FlagValues, rows: Sequence[Any], device: str | None = None) -> int:
    """Writes the rows to --json, with the kind of device, and returns the exit code 0."""
    if device is None:
        device = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    output.write_json(values.json, {"device": device, "rows": rows})
    return 0
