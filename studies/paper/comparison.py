"""Compares published figures of the GShard paper with figures of plans.

A comparison only reads plans; nothing here changes a plan. The comparisons are in rows.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from lingvo_gshard.wings.planning.plan.plan import Plan, Record

Plans = Mapping[str, Plan]


@dataclasses.dataclass(frozen=True)
class Case:
    """An experiment to plan on a topology.

    Attributes:
      name: name of the case.
      experiment: registered name of the experiment.
      topology: the machine.
      settings: hyperparameters that differ from the experiment's, by path.
    """

    name: str
    experiment: str
    topology: str
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The expected range of the ratio of our figure to the published one.

    Attributes:
      text: the range in words.
      low: smallest expected ratio.
      high: largest expected ratio.
    """

    text: str
    low: float
    high: float

    def contain(self, ratio: float) -> bool:
        """Returns whether a ratio is in the range."""
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
    """A published figure and how to compute the same figure from plans.

    Attributes:
      name: quantity and model, such as "weights.moe_512e_12l".
      what: quantity and model in words, with the unit.
      published: the paper's figure.
      place: where the paper has it.
      cases: names of the cases whose plans are needed.
      ours: computes our figure from the plans by name of their case.
      limits: the expected range of ours / published.
      explanation: assumptions, and reasons for a difference.
      needs_code: whether the plans must be compiled to the end, as their compile times count.
    """

    name: str
    what: str
    published: float
    place: str
    cases: tuple[str, ...]
    ours: Callable[[Plans], float]
    limits: Limits
    explanation: str = ""
    needs_code: bool = False

    @property
    def selectors(self) -> tuple[str, str, str]:
        """Returns the words that select this comparison: full name, quantity and model."""
        quantity, _, model = self.name.partition(".")
        return self.name, quantity, model


class ComparisonRow(Record, frozen=True, kw_only=True):
    """The result of a comparison. See `Comparison` for the attributes that it shares.

    Attributes:
      limits: the expected range of the ratio, in words.
      ours: our figure; None if a plan is missing.
      ratio: ours / published; None if a plan is missing or the published figure is 0.
      within: whether the ratio is in the expected range; None if a plan is missing.
    """

    name: str
    what: str
    published: float
    place: str
    limits: str
    cases: list[str]
    explanation: str
    ours: float | None
    ratio: float | None
    within: bool | None


def compare(comparison: Comparison, plans: Plans) -> ComparisonRow:
    """Returns the result of a comparison.

    If the published figure is 0, ours is expected to be 0, too.
    """
    ours = comparison.ours(plans)
    ratio = ours / comparison.published if comparison.published else None
    within = comparison.limits.contain(ratio) if ratio is not None else not ours
    return _row(comparison, comparison.explanation, ours, ratio, within)


def not_compared(comparison: Comparison, reason: str) -> ComparisonRow:
    """Returns the row of a comparison whose plans could not be made, with the reason."""
    return _row(comparison, reason, None, None, None)


def _row(
    comparison: Comparison,
    explanation: str,
    ours: float | None,
    ratio: float | None,
    within: bool | None,
) -> ComparisonRow:
    return ComparisonRow(
        name=comparison.name,
        what=comparison.what,
        published=comparison.published,
        place=comparison.place,
        limits=comparison.limits.text,
        cases=list(comparison.cases),
        explanation=explanation,
        ours=ours,
        ratio=ratio,
        within=within,
    )
