"""Finds what limits a measured step: where it takes longer than its plan says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lingvo_gshard.planning.kinds import ROUTING
from lingvo_gshard.profiling.comparison import Comparison, PartComparison
from lingvo_gshard.profiling.profile import HOST, PAUSES, Profile

# Shares of the product's rate that a step should reach (docs/gpu.md).
GOALS = {"dense": 0.5, "experts": 0.4}
_SHOWN = 10


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a part of a step takes beyond its plan.

    Attributes:
      part: a kind of work, a layer in a phase, or a part of the step that no plan has.
      predicted: seconds by the plan.
      measured: measured seconds.
      seconds: measured less predicted.
      share: `seconds` by the measured seconds of the step.
    """

    part: str
    predicted: float
    measured: float
    seconds: float
    share: float


def goal(comparison: Comparison) -> float:
    """Returns the MFU that the step should reach: that of a dense model or of one with experts."""
    is_sparse = any(row.part == ROUTING and row.predicted for row in comparison.kinds)
    return GOALS["experts" if is_sparse else "dense"]


def of_kinds(comparison: Comparison, profile: Profile) -> list[Gap]:
    """Returns the gap of each kind of work, largest first, and what no plan has."""
    rows = [(row.part, row.predicted, row.measured) for row in comparison.kinds]
    rows += [(part, 0.0, profile.seconds_of(part)) for part in (PAUSES, HOST)]
    return _gaps(rows, comparison.measured)


def of_layers(comparison: Comparison) -> list[Gap]:
    """Returns the largest gaps of layers and phases."""
    return _gaps(
        [(_name(r), r.predicted, r.measured) for r in comparison.layers], comparison.measured
    )[:_SHOWN]


def in_words(gaps: Sequence[Gap], mfu: float, wanted: float) -> list[str]:
    """Returns sentences on the largest gaps and on the goal.

    Args:
      gaps: the gaps of kinds, largest first.
      mfu: measured MFU, relative to the measured product.
      wanted: the goal.
    """
    reached = "reaches" if mfu >= wanted else "misses"
    said = [f"The step {reached} the goal: MFU {mfu:.1%} of the product's rate, goal {wanted:.0%}."]
    slower = [gap for gap in gaps if gap.share >= 0.01][:3]
    said += [
        f"{gap.part}: {gap.share:.1%} of the step is time beyond the plan "
        f"({gap.measured * 1e3:,.2f} ms, {gap.predicted * 1e3:,.2f} ms planned)."
        for gap in slower
    ]
    if not slower:
        said.append("No kind of work takes noticeably longer than planned.")
    return said


def _name(row: PartComparison) -> str:
    return f"{row.part or '(no layer)'}, {row.phase}"


def _gaps(rows: Sequence[tuple[str, float, float]], step: float) -> list[Gap]:
    gaps = [
        Gap(
            part=part,
            predicted=predicted,
            measured=measured,
            seconds=measured - predicted,
            share=(measured - predicted) / step,
        )
        for part, predicted, measured in rows
        if predicted or measured
    ]
    return sorted(gaps, key=lambda gap: -gap.seconds)
