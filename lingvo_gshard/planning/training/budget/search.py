"""Searches model size, experts, tokens and machine for the lowest loss of a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.training.budget import laws
from lingvo_gshard.planning.training.budget.options import BudgetOptions, assumptions, check
from lingvo_gshard.planning.training.budget.rating import Rated, rate
from lingvo_gshard.planning.training.budget.record import BudgetPlan, Choice, Sensitivity

# Active weights of the smaller and larger models that are listed, relative to the best.
_SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)
_MFUS = ("dense_mfu", "sparse_mfu")
_INVERSE = {"half": "twice", "twice": "half"}
# A size that changes by less is the same choice.
_SAME_SIZE = 1.25
# The smallest share of the longest time that is said to limit the choice.
_NEAR_LIMIT = 0.99


def plan_budget(options: BudgetOptions, machines: Sequence[Topology]) -> BudgetPlan:
    """Returns what to train for a budget.

    Args:
      options: money, time and assumptions.
      machines: the machines to choose from.

    Raises:
      UserError: an option is not in its range, or no machine can train the smallest model; names
        the flag.
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
    choice = best.choice(best.best)
    law = laws.get(options.law)
    price = best.topology.chip.price
    return BudgetPlan(
        budget=options.budget,
        currency=price.currency if price else "",
        law=law.name,
        source=law.source,
        best=choice,
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
    best = min(rated, key=lambda each: (each.lowest, each.topology.chips))
    return best if np.isfinite(best.lowest) else None


def _best_of_each(rated: Sequence[Rated], key: Callable[[Rated], str]) -> list[Choice]:
    """Returns the best choice of each group of rated machines, the lowest loss first."""
    groups: dict[str, Rated] = {}
    for each in rated:
        if np.isfinite(each.lowest):
            known = groups.get(key(each))
            if known is None or each.lowest < known.lowest:
                groups[key(each)] = each
    found = [each.choice(each.best) for each in groups.values()]
    return sorted(found, key=lambda choice: choice.loss)


def _sizes(rated: Rated) -> list[Choice]:
    active = rated.models.active
    wanted = [int(np.argmin(np.abs(active - factor * active[rated.best]))) for factor in _SIZES]
    return [
        rated.choice(index) for index in dict.fromkeys(wanted) if np.isfinite(rated.loss[index])
    ]


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
    before = best.choice(best.best)
    found = [
        _sensitivity(text, changed, machines, before, changed.law == options.law)
        for text, changed in _changes(options, best.topology.chip.key)
    ]
    # Other laws come last, because their losses do not compare.
    found.sort(key=lambda row: (row.loss_change is None, -abs(row.loss_change or 0.0)))
    return found


def _sensitivity(
    text: str,
    options: BudgetOptions,
    machines: Sequence[Topology],
    before: Choice,
    is_same_law: bool,
) -> Sensitivity:
    best = _best(_rate_all(options, machines))
    if best is None:
        return Sensitivity(text, None, None, ["machine", "experts", "size"])
    after = best.choice(best.best)
    ratio = after.active / before.active
    decides = [
        name
        for name, is_other in (
            ("machine", before.topology.rpartition(":")[0] != after.topology.rpartition(":")[0]),
            ("experts", before.experts != after.experts),
            ("size", not 1 / _SAME_SIZE < ratio < _SAME_SIZE),
        )
        if is_other
    ]
    return Sensitivity(text, after, after.loss - before.loss if is_same_law else None, decides)


def _notes(options: BudgetOptions, law: laws.Law, best: Rated) -> list[str]:
    choice, notes = best.choice(best.best), []
    if choice.active > law.most_active:
        notes.append(
            f"extrapolated: the law {law.name} was fitted to models of up to {law.most_active:.2g} "
            f"active weights; this one has {choice.active / law.most_active:.3g} times as many"
        )
    if choice.expansion == max(each.expansion for each in law.experts):
        notes.append(f"the law {law.name} was fitted to no more experts; more might be better yet")
    larger = best.loss[best.best + 1 :]
    if not len(larger) or not best.best:
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
