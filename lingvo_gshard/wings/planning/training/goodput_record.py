"""Goodput: what a whole training takes with its failures, as data for every report."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Assumption:
    """A number that the plan of a training rests on and that cannot be compiled.

    Units are "seconds", "bytes", "bytes/s", "chip-hours" and "share". `flag` is its option.
    """

    name: str
    value: float
    unit: str
    flag: str
    source: str


@dataclasses.dataclass(frozen=True)
class Range:
    """The spread of a number over simulated runs: its mean, and quantiles of 5, 50 and 95%."""

    mean: float
    low: float
    median: float
    high: float


@dataclasses.dataclass(frozen=True)
class Alternative:
    """The training's time if one assumption is another, by the closed formula.

    Attributes:
      change: the assumption and its new value.
      interval: the best interval between checkpoints, in seconds.
      goodput: expected part of the time that makes progress; 0 if almost none does.
      days: expected days; None if the training would not end.
      price: expected price; None as `days`, or if no price is published.
      flag: the option that sets the assumption.
    """

    change: str
    interval: float
    goodput: float
    days: float | None
    price: float | None
    flag: str


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The time of a training with its failures, checkpoints and restarts.

    Times are in seconds unless their name says otherwise.

    Attributes:
      checkpoint_bytes: weights and moments of the whole model.
      between_failures, stall, write, restart: as in `formulas.Interruptions`.
      interval: work between two checkpoints.
      interval_steps: the same in steps.
      young_interval: Young's formula of 1974 for the best interval.
      daly_interval: Daly's formula of 2006 for the best interval.
      goodput: simulated part of the time that makes progress: of all runs together, then quantiles.
      formula_goodput: the same by the closed formula.
      days: days from the first start to the last checkpoint.
      days_without_failures: days of the steps alone.
      days_bound: the same at the lower bound of the step's time.
      saving_share: part of the time that checkpoints stop the training.
      lost_share: part of the time whose work failures undo.
      restarting_share: part of the time that starts and restarts take.
      price: of all chips for these days; None if no price is published.
      currency: ISO code; None if no price is published.
      published_rates: the result with each published failure rate.
      sensitivities: the result with half and twice each assumption, the largest effect first.
      recoveries: the result if a person starts the run again from a checkpoint, and if agents start
        it again from a snapshot in memory.
      agents: which of the two the result is of.
    """

    tokens: float
    steps: float
    chips: int
    checkpoint_bytes: int
    between_failures: float
    stall: float
    write: float
    restart: float
    interval: float
    interval_steps: int
    young_interval: float
    daly_interval: float
    goodput: Range
    formula_goodput: float
    days: Range
    days_without_failures: float
    days_bound: float
    failures: Range
    saving_share: float
    lost_share: float
    restarting_share: float
    price: Range | None
    currency: str | None
    runs: int
    seed: int
    assumptions: list[Assumption]
    published_rates: list[Alternative]
    sensitivities: list[Alternative]
    recoveries: list[Alternative]
    agents: bool


@dataclasses.dataclass(frozen=True)
class Choice:
    """A model, its tokens and the machine that trains it within the budget.

    Attributes:
      experts: the experts in words, such as "1 of 8 experts".
      expansion, granularity: as in `laws.Experts`.
      days: time with failures and checkpoints.
    """

    topology: str
    chips: int
    experts: str
    expansion: int
    granularity: int
    model_dim: int
    layers: int
    active: float
    total: float
    tokens: float
    loss: float
    days: float
    goodput: float
    price: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The best choice if one assumption is another.

    Attributes:
      choice: the best choice; None if nothing can be trained.
      loss_change: loss of this choice minus the loss of the best choice without the change. None
        without a choice, and for another scaling law: losses of two laws do not compare.
      decides: the parts of the choice that change: "machine", "experts", "size" (by a quarter or
        more).
    """

    change: str
    choice: Choice | None
    loss_change: float | None
    decides: list[str]


@dataclasses.dataclass(frozen=True)
class BudgetPlan:
    """The training for a budget.

    Attributes:
      machines: the best choice on each kind of chip, the lowest loss first.
      experts: the best choice with each number of experts that the law was fitted to.
      sizes: the best machine and experts with smaller and larger models.
      sensitivities: the best choice under each changed assumption, the largest effect first.
      notes: how far the law is extrapolated, and limits that the choice meets.
    """

    budget: float
    currency: str
    law: str
    source: str
    best: Choice
    machines: list[Choice]
    experts: list[Choice]
    sizes: list[Choice]
    sensitivities: list[Sensitivity]
    assumptions: list[Assumption]
    notes: list[str]
