"""Searches model size, experts, tokens and machine for the lowest loss of a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.planning.machines import chips, topologies
from lingvo_gshard.wings.planning.machines.chips import Chip
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.training import formulas, job
from lingvo_gshard.wings.planning.training.budget import laws
from lingvo_gshard.wings.planning.training.budget.laws import Experts, Shapes
from lingvo_gshard.wings.planning.training.formulas import default, get
from lingvo_gshard.wings.planning.training.goodput_record import (
    Assumption,
    BudgetPlan,
    Choice,
    Sensitivity,
)
from lingvo_gshard.wings.planning.training.job import COPY_RATE

# Field of `BudgetOptions` -> its assumption: name, unit, value and source.
_STATED = formulas.FIGURES["budget"]
DENSE_MFU: float = _STATED["dense_mfu"]["value"]
SPARSE_MFU: float = _STATED["sparse_mfu"]["value"]
STATE_BYTES: float = _STATED["state_bytes"]["value"]
DAYS: float = _STATED["days"]["value"]
# The part of a device's memory that weights, gradients and moments may fill.
STATE_SHARE = 0.5
# The part of the state that a checkpoint has: no gradients.
SAVED_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
    """Options of the search for the best training of a budget.

    Attributes:
      budget: money, in the currency of list prices.
      days: longest time of the training.
      tokens: largest number of tokens to train on, such as the size of one's corpus; None is
        without limit.
      state_bytes: bytes of training state for each weight.
      failures, checkpoint_rate, restart: as in `job.JobOptions`.
      price_factors: factors of list prices by the chip's key.
    """

    budget: float
    days: float = DAYS
    tokens: float | None = None
    law: str = "joint"
    dense_mfu: float = DENSE_MFU
    sparse_mfu: float = SPARSE_MFU
    state_bytes: float = STATE_BYTES
    failures: str | None = None
    checkpoint_rate: float = job.HOST_RATE
    restart: float = job.RESTART
    price_factors: Mapping[str, float] = dataclasses.field(default_factory=dict)


def check(options: BudgetOptions) -> None:
    """Raises UserError if an option is not in its range; names the option."""
    laws.get(options.law)
    if options.failures is not None:
        formulas.get(options.failures)
    for flag, value, example in (
        ("budget", options.budget, "1e6 USD"),
        ("days", options.days, "90"),
        ("tokens", options.tokens, "1e12"),
        ("state_bytes", options.state_bytes, "16 bytes for each weight"),
        ("checkpoint_rate", options.checkpoint_rate, "1e9 bytes per second"),
    ):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"`{flag}={value:g}`: expected more than 0, such as {example}")
    for value in (options.dense_mfu, options.sparse_mfu):
        if not 0 < value <= 1:
            raise UserError(f"`mfu={value:g}`: expected more than 0 and at most 1, such as 0.4")
    if not 0 <= options.restart < math.inf:
        raise UserError(f"`restart={options.restart:g}`: expected seconds, 0 or more")


def assumptions(options: BudgetOptions) -> list[Assumption]:
    """Returns what the search assumes, each with its option and source."""
    defaults, rows = BudgetOptions(options.budget), []
    for field, stated in _STATED.items():
        value, flag = getattr(options, field), stated["flag"]
        source = stated["source"] if value == getattr(defaults, field) else f"`{flag}`"
        rows.append(Assumption(stated["name"], value, stated["unit"], flag, source))
    return rows


# The largest cluster of GPUs that is tried.
_MOST_HOSTS = 4096
# Bytes per second between the GPUs of a host. Slower links are PCI Express; over PCI Express a
# training does not reach the MFU that a budget assumes.
_SLOWEST_LINK = 100e9


def priced_machines() -> list[Topology]:
    """Returns machines of every kind of accelerator with a list price and fast links."""
    found = []
    for chip in chips.CHIPS.values():
        is_fast = chip.kind == "tpu" or chip.link_bandwidth >= _SLOWEST_LINK
        if chip.price is not None and chip.kind != "cpu" and is_fast:
            found += [topologies.get(name) for name in _names(chip)]
    return found


def named_machines(text: str) -> list[Topology]:
    """Returns the machines of `topology`. Raises UserError if one is unknown or has no price."""
    found = [topologies.get(name) for name in text.split(",")]
    for topology in found:
        if topology.chip.price is None:
            priced = [chip.key for chip in chips.CHIPS.values() if chip.price is not None]
            raise UserError(
                f"`topology={text}`: no price of {topology.chip.name} is published, so a budget "
                f"buys no time on it; expected one of {', '.join(priced)}"
            )
    return found


def _names(chip: Chip) -> list[str]:
    if chip.kind == "gpu":
        sizes = [2**power for power in range(int(math.log2(_MOST_HOSTS)) + 1)]
        return [f"gpu:{chip.key}:{hosts}x{chip.host_chips}" for hosts in sizes]
    found, shape = [], (2, 2, 1)[: len(chip.pod_shape)]
    while all(
        size <= most for size, most in zip(sorted(shape), sorted(chip.pod_shape), strict=True)
    ):
        found.append(f"{chip.key}:{'x'.join(map(str, shape))}")
        # The last of the smallest dimensions doubles, so that slices stay near cubes.
        smallest = max(range(len(shape)), key=lambda index: (-shape[index], index))
        shape = tuple(size * (1 + (index == smallest)) for index, size in enumerate(shape))
    return found


def goodputs(
    between_failures: float, stall: np.ndarray, write: np.ndarray, restart: np.ndarray
) -> np.ndarray:
    """Returns the expected goodput of trainings that save at Daly's interval.

    The same as `formulas.expected_goodput` at `formulas.daly_interval`, for arrays.
    `formulas.Interruptions` explains the arguments.
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
# A training with a lower goodput than this is left out.
_LOWEST_GOODPUT = 0.01


@dataclasses.dataclass(frozen=True)
class Rated:
    """Models of all sizes with the same experts on one machine; one number for each size.

    Attributes:
      tokens: tokens that the budget, the days and the option `tokens` allow.
      loss: by the scaling law; infinite for a model that the machine cannot hold or finish.
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
    def best_index(self) -> int:
        """The index of the lowest loss."""
        return int(np.argmin(self.loss))

    @property
    def lowest_loss(self) -> float:
        """The lowest loss; infinite if the machine can train no model."""
        return float(self.loss[self.best_index])

    @property
    def best_choice(self) -> Choice:
        """The model with the lowest loss, with its training."""
        return self.choice(self.best_index)

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
    fits = models.total * asked.state_bytes <= (STATE_SHARE * chip.usable_bytes * topology.devices)
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
    found = get(asked.failures) if asked.failures else default(topology)
    saved = state_bytes * SAVED_SHARE
    transfer = saved / (asked.checkpoint_rate * topology.hosts)
    return goodputs(
        found.chip_hours * _HOUR / topology.chips,
        saved / topology.devices / COPY_RATE,
        transfer,
        asked.restart + transfer,
    )


# Active weights of the smaller and larger models that are listed, relative to the best.
_SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)
_MFUS = ("dense_mfu", "sparse_mfu")
_INVERSE = {"half": "twice", "twice": "half"}
# Sizes that differ by a smaller factor than this count as the same choice.
_SAME_SIZE = 1.25
# The smallest share of the longest time that is said to limit the choice.
_NEAR_LIMIT = 0.99


def plan_budget(options: BudgetOptions, machines: Sequence[Topology]) -> BudgetPlan:
    """Returns what to train for a budget.

    Raises:
      UserError: an option is not in its range, or no machine can train the smallest model; names
        the option.
    """
    check(options)
    rated = _rate_all(options, machines)
    best = _best(rated)
    if best is None:
        raise UserError(
            f"`budget={options.budget:g}`: no machine of {len(machines)} can train even the "
            f"smallest model in `days={options.days:g}`; expected more money or days, or a larger "
            "`topology`"
        )
    law = laws.get(options.law)
    price = best.topology.chip.price
    return BudgetPlan(
        budget=options.budget,
        currency=price.currency if price else "",
        law=law.name,
        source=law.source,
        best=best.best_choice,
        machines=_best_of_each(rated, lambda each: each.topology.chip.key),
        experts=_best_of_each(rated, lambda each: str(each.models.experts)),
        sizes=_sizes(best),
        sensitivities=_sensitivities(options, machines, best),
        assumptions=assumptions(options),
        notes=_notes(options, law, best),
    )


def _rate_all(options: BudgetOptions, machines: Sequence[Topology]) -> list[Rated]:
    experts = laws.get(options.law).experts
    return [rate(machine, each, options) for machine in machines for each in experts]


def _best(rated: Sequence[Rated]) -> Rated | None:
    """Returns the machine and experts with the lowest loss; None if none can train a model."""
    best = min(rated, key=lambda each: (each.lowest_loss, each.topology.chips))
    return best if np.isfinite(best.lowest_loss) else None


def _best_of_each(rated: Sequence[Rated], key: Callable[[Rated], str]) -> list[Choice]:
    """Returns the best choice of each group of rated machines, the lowest loss first."""
    groups: dict[str, Rated] = {}
    for each in sorted(rated, key=lambda each: each.lowest_loss):
        if np.isfinite(each.lowest_loss):
            groups.setdefault(key(each), each)
    return [each.best_choice for each in groups.values()]


def _sizes(rated: Rated) -> list[Choice]:
    active = rated.models.active
    best = active[rated.best_index]
    wanted = dict.fromkeys(int(np.argmin(np.abs(active - factor * best))) for factor in _SIZES)
    return [rated.choice(index) for index in wanted if np.isfinite(rated.loss[index])]


def _changes(options: BudgetOptions, chip: str) -> Iterator[tuple[str, BudgetOptions]]:
    """Yields assumptions that are changed one by one, each with the changed options."""
    change = dataclasses.replace
    for text, factor in (("half", 0.5), ("twice", 2.0)):
        yield f"{text} the budget", change(options, budget=options.budget * factor)
        yield f"{text} the days", change(options, days=options.days * factor)
        bytes_each = options.state_bytes * factor
        yield f"{text} the state of a weight", change(options, state_bytes=bytes_each)
        sparse = min(1.0, options.sparse_mfu * factor)
        yield f"{text} the MFU with experts ({sparse:.0%})", change(options, sparse_mfu=sparse)
        both = {name: min(1.0, getattr(options, name) * factor) for name in _MFUS}
        yield f"{text} the MFU of all models", change(options, **both)
        prices = {**options.price_factors, chip: options.price_factors.get(chip, 1.0) * factor}
        what = f"{text} the price of {chip}, or {_INVERSE[text]} its MFU"
        yield what, change(options, price_factors=prices)
    for name in ("opt", "tpu_v4"):
        yield f"failures as of {name}", change(options, failures=name)
    for name in laws.LAWS:
        if name != options.law:
            yield f"the law {name}", change(options, law=name)


def _sensitivities(
    options: BudgetOptions, machines: Sequence[Topology], best: Rated
) -> list[Sensitivity]:
    before, found = best.best_choice, []
    for text, changed in _changes(options, best.topology.chip.key):
        other = _best(_rate_all(changed, machines))
        after = other.best_choice if other else None
        loss = after.loss - before.loss if after and changed.law == options.law else None
        found.append(Sensitivity(text, after, loss, _differing_parts(before, after)))
    # Other laws come last, because their losses do not compare.
    found.sort(key=lambda row: (row.loss_change is None, -abs(row.loss_change or 0.0)))
    return found


def _differing_parts(before: Choice, after: Choice | None) -> list[str]:
    """Returns the parts of a choice that differ; all if nothing can be trained."""
    if after is None:
        return ["machine", "experts", "size"]
    parts = {
        "machine": before.topology.rpartition(":")[0] != after.topology.rpartition(":")[0],
        "experts": before.experts != after.experts,
        "size": not 1 / _SAME_SIZE < after.active / before.active < _SAME_SIZE,
    }
    return [part for part, differs in parts.items() if differs]


def _notes(options: BudgetOptions, law: laws.Law, best: Rated) -> list[str]:
    choice, notes = best.best_choice, []
    if choice.active > law.most_active:
        notes.append(
            f"extrapolated: the law {law.name} was fitted to models of up to {law.most_active:.2g} "
            f"active weights; this one has {choice.active / law.most_active:.3g} times as many"
        )
    if choice.expansion == max(each.expansion for each in law.experts):
        notes.append(f"the law {law.name} was fitted to no more experts; more might be better yet")
    larger = best.loss[best.best_index + 1 :]
    if not len(larger) or not best.best_index:
        which = "smallest" if len(larger) else "largest"
        notes.append(f"the {which} model that is searched, of {choice.layers} layers")
    elif not np.isfinite(larger).any():
        notes.append(f"the memory of {choice.topology} limits the size of the model")
    if options.tokens is not None and choice.tokens >= options.tokens * _NEAR_LIMIT:
        notes.append(f"`tokens={options.tokens:g}` limits the training")
    if choice.days >= options.days * _NEAR_LIMIT:
        notes.append(f"`days={options.days:g}` limits the training")
    if choice.price < options.budget * _NEAR_LIMIT:
        notes.append(f"only {choice.price / options.budget:.1%} of the budget is spent")
    return notes
