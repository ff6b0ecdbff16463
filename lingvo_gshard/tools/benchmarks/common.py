"""Flags and results that measurements share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags

from lingvo_gshard.core import UserError, tf
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import integer, string

EXPERIMENT = string("The experiment whose model is measured.", "translation.quickstart")
REPEATS = integer("Number of measurements.", 10, 1)


def gemm_size(default: int | None = 2048) -> Any:
    """Declares --gemm_size; None chooses a size that reaches the device's full rate."""
    usual = "" if default else "; by default large enough for the device's full rate"
    return integer(f"Rows and columns of the reference product's matrices{usual}.", default, 1)


def numbers(flag: str, given: list[str]) -> list[int]:
    """Returns the integers of a list flag; UserError unless all are positive."""
    try:
        found = [int(number) for number in given]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"--{flag}={','.join(given)}: expected positive integers")
    return found


def write(values: flags.FlagValues, rows: Sequence[Any], device: str | None = None) -> int:
    """Writes rows and device to --json, and returns the exit code 0.

    The device is by default the kind that TensorFlow computes on.
    """
    if device is None:
        device = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    output.write_json(values.json, {"device": device, "rows": rows})
    return 0
