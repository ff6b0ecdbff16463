"""Compares a profile with the plan of the same step, and makes a calibration of their ratio."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.planning.calibration import Calibration, WorkKindRatio
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.operation_rows import KINDS
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.profiling.profile import HOST, PAUSES, Profile, Record
from lingvo_gshard.wings.profiling.timeline import StepRange

# A kind of work, or a layer, and the phase.
_Part = tuple[str, str]


class PartComparison(Record, frozen=True, kw_only=True):
    """Predicted and measured seconds of a kind of work, or of a layer in a phase, on one device."""

    part: str
    phase: str
    predicted: float
    measured: float


class Comparison(Record, frozen=True, kw_only=True):
    """Predicted and measured seconds of a step. A plan knows neither pauses nor the host.

    Layers have a row for each phase, most measured seconds first.
    """

    predicted: float
    measured: float
    kinds: list[PartComparison]
    layers: list[PartComparison]


def check_comparable(plan: Plan | None, path: str) -> None:
    """Checks that a plan has times to compare a profile with. Raises UserError if it has none."""
    if plan is None:
        raise UserError(
            f"`plan={path}` has no times to compare a profile with, since the search compiled "
            "nothing. Search with `search_compilations=1` or more"
        )
    if not plan.kinds:
        raise UserError(
            f"`plan={path}`: the plan does not tell kinds of work apart. Plan again with this "
            "version"
        )


def check_plan(plan: Plan, path: str, mesh: str, devices: int, chip: str) -> None:
    """Raises UserError if a plan is for other devices than the run's; chip "" is not checked."""
    planned = topologies.get(plan.topology).chip
    if chip and chip != planned.key:
        raise UserError(
            f"`plan={path}`: a plan for {plan.topology} ({planned.name}), but this run's devices "
            f"are of the kind {chip}"
        )
    if plan.devices != devices or (devices > 1 and plan.mesh != mesh):
        raise UserError(
            f"`plan={path}`: a plan for mesh {plan.mesh} of {plan.devices:,} devices, but this run "
            f"has mesh {mesh} of {devices:,}. Plan again with gshard-plan --mesh={mesh}"
        )


def compare(profile: Profile, plan: Plan) -> Comparison:
    """Compares predicted with measured times. A part that is only in one has 0 s in the other."""
    kinds = {(row.kind, ""): row.seconds for row in plan.kinds}
    measured_kinds = {(kind, ""): profile.seconds_of(kind) for kind in KINDS}
    layers: dict[tuple[str, str], float] = collections.defaultdict(float)
    for row in plan.layers:
        layers[row.layer, row.phase] += row.seconds
    measured = {(row.layer, row.phase): row.seconds for row in profile.layers}
    shown = [key for key, seconds in measured_kinds.items() if key in kinds or seconds]
    return Comparison(
        predicted=plan.seconds_per_step,
        measured=profile.seconds_per_step,
        kinds=_rows(shown, kinds, measured_kinds),
        layers=_rows(dict.fromkeys([*measured, *layers]), layers, measured),
    )


def _rows(
    parts: Iterable[_Part], predicted: Mapping[_Part, float], measured: Mapping[_Part, float]
) -> list[PartComparison]:
    return [
        PartComparison(
            part=part[0],
            phase=part[1],
            predicted=predicted.get(part, 0.0),
            measured=measured.get(part, 0.0),
        )
        for part in parts
    ]


def calibrate(profile: Profile, plan: Plan) -> Calibration | None:
    """Returns the calibration to measured times; None if the plan is calibrated already."""
    if plan.is_calibrated:
        return None
    rows = compare(profile, plan).kinds
    return Calibration(
        chip=topologies.get(plan.topology).chip.key,
        topology=plan.topology,
        experiment=profile.name,
        mesh=profile.mesh,
        steps=str(StepRange(profile.first_step, profile.last_step)),
        kinds=[
            WorkKindRatio(
                kind=row.part,
                measured=row.measured,
                predicted=row.predicted,
                ratio=row.measured / row.predicted,
            )
            for row in rows
            if row.measured and row.predicted
        ],
        seconds_outside=profile.seconds_of(PAUSES) + profile.seconds_of(HOST),
    )
