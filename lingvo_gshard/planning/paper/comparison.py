"""Published figures of the GShard paper beside those of plans: what a comparison is.

Nothing here changes a plan: a comparison takes a number out of plans and puts it beside what was
published. paper_rows.py has the comparisons.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

Record = Mapping[str, Any]
Plans = Mapping[str, Record]


@dataclasses.dataclass(frozen=True)
class Case:
    """What a plan is made of: an experiment on a topology, with Params by path set otherwise."""

    name: str
    experiment: str
    topology: str
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the ratio of ours to the published figure may be, and that in words."""

    text: str
    low: float
    high: float

    def hold(self, ratio: float) -> bool:
        """Whether a ratio is within them."""
        return self.low <= ratio <= self.high


WITHIN_15 = Limits("within 15%", 0.85, 1.15)
WITHIN_30 = Limits("within 30%", 0.7, 1.3)
BOUND = Limits("1 to 2.5 times", 1.0, 2.5)
AT_LEAST = Limits("at least", 1.0, math.inf)
AT_MOST = Limits("at most", 0.0, 1.0)
AT_MOST_TWICE = Limits("at most 2 times", 0.0, 2.0)
AT_MOST_1_3 = Limits("at most 1.3 times", 0.0, 1.3)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A published figure, and how plans give the same.

    name: quantity and model, such as "weights.moe_512e_12l". what: both in words, with the unit.
    place: in the paper. cases: names of the plans needed. ours: the number, of those plans' records
    (Plan.to_json) by case. explanation: what is assumed, and why they differ where they do.
    """

    name: str
    what: str
    published: float
    place: str
    cases: tuple[str, ...]
    ours: Callable[[Plans], float]
    limits: Limits
    explanation: str = ""

    @property
    def parts(self) -> tuple[str, str, str]:
        """What it may be called by: its name, its quantity, and its model."""
        quantity, _, model = self.name.partition(".")
        return self.name, quantity, model


def compare(comparison: Comparison, plans: Plans) -> dict[str, Any]:
    """Returns a row: published, ours, their ratio, and whether it is within limits.

    Where 0 is published, there is no ratio, and ours must be 0, too.
    """
    ours = comparison.ours(plans)
    ratio = ours / comparison.published if comparison.published else None
    within = comparison.limits.hold(ratio) if ratio is not None else not ours
    return {**_described(comparison), "ours": ours, "ratio": ratio, "within": within}


def not_compared(comparison: Comparison, reason: str) -> dict[str, Any]:
    """Returns the row of a comparison whose plans could not be made, and why."""
    row = {**_described(comparison), "ours": None, "ratio": None, "within": None}
    return {**row, "explanation": reason}


def _described(comparison: Comparison) -> dict[str, Any]:
    return {
        "name": comparison.name,
        "what": comparison.what,
        "published": comparison.published,
        "place": comparison.place,
        "limits": comparison.limits.text,
        "cases": list(comparison.cases),
        "explanation": comparison.explanation,
    }
