"""Calibration: measured by predicted time of each kind of work on one chip.

A profile of a step that was planned before gives one file (docs/profiling.md). Plans for the same
chip multiply their estimates by its ratios, and add what a step took outside of operations. Bounds
stay as they are.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import msgspec

from lingvo_gshard.core import UserError, atomic, objects
from lingvo_gshard.wings.planning.machines import chips
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.operation_rows import KINDS, kind_of
from lingvo_gshard.wings.planning.plan.plan import Record
from lingvo_gshard.wings.planning.roofline import TimedOperation

FORMAT = 1


class WorkKindRatio(Record, frozen=True, kw_only=True):
    """Measured and predicted seconds of one kind of work (`operation_rows.KINDS`) on one device.

    The prediction is the plan's estimate before calibration. `ratio` is measured by predicted.
    """

    kind: str
    measured: float
    predicted: float
    ratio: float


class Calibration(Record, frozen=True, kw_only=True):
    """Times of kinds of work on a chip, relative to the planner's estimates.

    Attributes:
      chip: the chip's key, such as "v5p".
      steps: the profiled steps, such as "20:23".
      kinds: a row for each kind that took time and was predicted to.
      seconds_outside: time of a step outside of operations: pauses between operations, and the
        host. Waiting for input does not count.
    """

    format: int = FORMAT
    chip: str
    topology: str
    experiment: str
    mesh: str
    steps: str
    kinds: list[WorkKindRatio]
    seconds_outside: float

    @property
    def note(self) -> str:
        """A sentence for the notes of a plan."""
        ratios = ", ".join(f"{row.kind} x{row.ratio:.3g}" for row in self.kinds)
        return (
            f"estimates are calibrated by steps {self.steps} of {self.experiment} on "
            f"{self.topology}, mesh {self.mesh}: {ratios}, and {self.seconds_outside * 1e3:,.3g} "
            "ms of a step for pauses between operations and the host"
        )


def load(path: str | pathlib.Path) -> Calibration:
    """Returns the calibration of a file. Raises UserError if it is missing or is none."""
    try:
        return atomic.decode(objects.read_bytes(path), Calibration)
    except OSError as error:
        raise UserError(f"`calibration={path}`: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UserError(
            f"`calibration={path}`: not a calibration: {error}. gshard-train --profile_steps "
            "--plan writes one"
        ) from error


def check_chip(calibration: Calibration, path: str, topology: Topology) -> None:
    """Raises ValueError if a calibration was measured on another chip than the topology's."""
    if calibration.chip != topology.chip.key:
        measured = chips.CHIPS[calibration.chip].name if calibration.chip in chips.CHIPS else "?"
        raise UserError(
            f"`calibration={path}`: measured on {calibration.chip} ({measured}), but "
            f"`topology={topology.name}` has {topology.chip.key} ({topology.chip.name}). Ratios "
            "hold for one chip only"
        )


def calibrated(
    timed: Sequence[TimedOperation], calibration: Calibration, layers: Mapping[str, str | None]
) -> list[TimedOperation]:
    """Returns operations with calibrated estimates. Kinds without a ratio keep theirs.

    Args:
      layers: kinds of layers, as `operation_rows.kinds_of_layers` returns them.
    """
    ratios = dict.fromkeys(KINDS, 1.0) | {row.kind: row.ratio for row in calibration.kinds}
    return [
        dataclasses.replace(each, seconds=each.seconds * ratios[kind_of(each.operation, layers)])
        for each in timed
    ]
