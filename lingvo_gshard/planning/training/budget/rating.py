"""Rates all sizes of a model on one machine: the tokens that a budget buys, and their loss."""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.training import failures
from lingvo_gshard.planning.training.budget import laws, options
from lingvo_gshard.planning.training.budget.laws import Experts, Shapes
from lingvo_gshard.planning.training.budget.options import BudgetOptions
from lingvo_gshard.planning.training.budget.record import Choice
from lingvo_gshard.planning.training.job import COPY_RATE


def goodputs(
    between_failures: float, stall: np.ndarray, write: np.ndarray, restart: np.ndarray
) -> np.ndarray:
    """Returns the expected goodput of trainings that save at Daly's interval.

    The same as `formulas.expected_goodput` at `formulas.daly_interval`, for arrays.

    Args:
      between_failures: mean seconds between two failures of the machine.
      stall: seconds that training waits for a checkpoint.
      write: seconds after that until the checkpoint is complete.
      restart: seconds from a failure until training goes on.
    """
    ratio = stall / (2 * between_failures)
    root = np.sqrt(2 * stall * between_failures)
    daly = root * (1 + np.sqrt(ratio) / 3 + ratio / 9) - stall
    interval = np.where(ratio < 1, daly, between_failures).clip(np.maximum(write - stall, 1.0))
    period = np.minimum((interval + stall) / between_failures, 600.0)
    fixed = np.minimum((restart + write) / between_failures, 600.0)
    return interval / between_failures * np.exp(-fixed) / np.expm1(period)


_HOUR = 3600
_DAY = 24 * _HOUR
# With less progress than this a training is left out.
_LOWEST_GOODPUT = 0.01


@dataclasses.dataclass(frozen=True)
class Rated:
    """Models of all sizes with the same experts on one machine; one number for each size.

    Attributes:
      topology: the machine.
      models: the models.
      tokens: tokens that the budget, the days and --tokens allow.
      loss: by the scaling law; infinite for a model that the machine cannot hold or finish.
      seconds: time of the training.
      goodput: part of it that makes progress.
      price: of the whole machine for a second.
    """

    topology: Topology
    models: Shapes
    tokens: np.ndarray
    loss: np.ndarray
    seconds: np.ndarray
    goodput: np.ndarray
    price: float

    @property
    def best(self) -> int:
        """The index of the lowest loss."""
        return int(np.argmin(self.loss))

    @property
    def lowest(self) -> float:
        """The lowest loss; infinite if the machine can train no model."""
        return float(self.loss[self.best])

    def choice(self, index: int) -> Choice:
        """Returns the model of an index with its training."""
        models, experts = self.models, self.models.experts
        layers = int(models.layers[index])
        return Choice(
            topology=self.topology.name,
            chips=self.topology.chips,
            experts=str(experts),
            expansion=experts.expansion,
            granularity=experts.granularity,
            model_dim=layers * laws.HEAD_DIM,
            layers=layers,
            active=float(models.active[index]),
            total=float(models.total[index]),
            tokens=float(self.tokens[index]),
            loss=float(self.loss[index]),
            days=float(self.seconds[index] / _DAY),
            goodput=float(self.goodput[index]),
            price=float(self.seconds[index] * self.price),
            flops=float(self.tokens[index] * models.flops[index]),
        )


def rate(topology: Topology, experts: Experts, asked: BudgetOptions) -> Rated:
    """Returns models of all sizes with such experts, trained on a machine for the budget."""
    models = laws.shapes(experts)
    chip = topology.chip
    price = _price_per_second(topology, asked)
    mfu = asked.dense_mfu if experts.expansion == 1 else asked.sparse_mfu
    speed = chip.peak("bfloat16") * topology.devices * mfu
    goodput = _goodput(topology, models.total * asked.state_bytes, asked)
    seconds = min(asked.budget / price, asked.days * _DAY)
    tokens = seconds * goodput * speed / models.flops
    if asked.tokens is not None:
        tokens = np.minimum(tokens, asked.tokens)
    fits = models.total * asked.state_bytes <= (
        options.STATE_SHARE * chip.usable_bytes * topology.devices
    )
    can_train = fits & (goodput > _LOWEST_GOODPUT) & (tokens >= 1)
    loss = laws.get(asked.law).loss(models, np.maximum(tokens, 1.0))
    return Rated(
        topology,
        models,
        tokens,
        np.where(can_train, loss, np.inf),
        tokens * models.flops / (speed * np.maximum(goodput, 1e-9)),
        goodput,
        price,
    )


def _price_per_second(topology: Topology, asked: BudgetOptions) -> float:
    price = topology.chip.price
    if price is None:
        raise UserError(f"`topology={topology.name}`: no price is published")
    factor = asked.price_factors.get(topology.chip.key, 1.0)
    return price.amount * factor * topology.chips / _HOUR


def _goodput(topology: Topology, state_bytes: np.ndarray, asked: BudgetOptions) -> np.ndarray:
    found = failures.get(asked.failures) if asked.failures else failures.default(topology)
    saved = state_bytes * options.SAVED_SHARE
    transfer = saved / (asked.checkpoint_rate * topology.hosts)
    return goodputs(
        found.chip_hours * _HOUR / topology.chips,
        saved / topology.devices / COPY_RATE,
        transfer,
        asked.restart + transfer,
    )
