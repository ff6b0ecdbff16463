"""The training for a budget, as data for every report."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.planning.training.record import Assumption


@dataclasses.dataclass(frozen=True)
class Choice:
    """A model, its tokens and the machine that trains it within the budget.

    Attributes:
      topology: the machine.
      chips: its chips.
      experts: the experts in words, such as "1 of 8 experts".
      expansion: weights of all experts, as a multiple of those that a token uses.
      granularity: experts that a token uses.
      model_dim: width.
      layers: depth.
      active: weights that a token uses.
      total: all weights.
      tokens: tokens to train on.
      loss: by the scaling law.
      days: time with failures and checkpoints.
      goodput: part of it that makes progress.
      price: of the whole time.
      flops: FLOPs of the training.
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
      change: the assumption and its new value.
      choice: the best choice; None if nothing can be trained.
      loss_change: its loss less that of the best choice; None between laws, whose losses do not
        compare, and without a choice.
      decides: what of the choice changes: "machine", "experts", "size" (by a quarter or more).
    """

    change: str
    choice: Choice | None
    loss_change: float | None
    decides: list[str]


@dataclasses.dataclass(frozen=True)
class BudgetPlan:
    """The training for a budget.

    Attributes:
      budget: the money.
      currency: ISO code.
      law: name of the scaling law.
      source: where it is published.
      best: the choice of the lowest loss.
      machines: the best choice on each kind of chip, the lowest loss first.
      experts: the best choice with each number of experts that the law was fitted to.
      sizes: the best machine and experts with smaller and larger models.
      sensitivities: the best choice if assumptions are others, the largest effect first.
      assumptions: what the search assumes.
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
