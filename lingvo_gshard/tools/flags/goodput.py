"""Flags of gshard-plan --goodput, and what they ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from lingvo_gshard.core import UserError, declared
from lingvo_gshard.tools.flags.definitions import Flags, decimal, refuse, string, switch
from lingvo_gshard.tools.flags.options import given_options, option_flags
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.training.budget import laws, search
from lingvo_gshard.wings.planning.training.budget.search import BudgetOptions
from lingvo_gshard.wings.planning.training.job import JobOptions

_NOT_WITH_BUDGET = (
    *("experiment", "config", "plan", "goodput", "generate", "search"),
    *("mesh", "strategy", "html"),
)


# --budget and the flags that only apply to it.
BUDGET_FLAGS: Flags = dict(
    budget=decimal(
        "Money in USD: searches model size, experts, tokens (at most --tokens) and machine (of "
        "--topology, else all with a list price) for the lowest loss by a scaling law."
    ),
    days=decimal("Longest training, with --budget.", search.DAYS),
    law=string(f"Scaling law, with --budget: {', '.join(laws.LAWS)}.", BudgetOptions.law),
    mfu=decimal(
        f"MFU of all models, with --budget. Unless given, {search.DENSE_MFU:.2g} for dense "
        f"models and {search.SPARSE_MFU:.2g} for those with experts."
    ),
    state_bytes=decimal(
        "Bytes of weight, gradient and moments for each weight, with --budget.", search.STATE_BYTES
    ),
)


def check_budget_flags(values: flags.FlagValues) -> None:
    """Raises UserError if flags of --budget are mixed with other plans' flags or out of range."""
    if values.budget is None:
        own = [name for name in BUDGET_FLAGS if name != "budget"]
        refuse(values, own, "applies to --budget, which is not given")
        return
    refuse(values, _NOT_WITH_BUDGET, "does not apply to --budget; give one of them")
    search.check(budget_options(values))


def budget_options(values: flags.FlagValues) -> BudgetOptions:
    """Returns the options that the flags give."""
    fields = [field.name for field in dataclasses.fields(BudgetOptions) if field.name in values]
    given: dict[str, Any] = {
        name: values[name].value for name in fields if values[name].value is not None
    }
    if values.mfu is not None:
        given |= {"dense_mfu": values.mfu, "sparse_mfu": values.mfu}
    return BudgetOptions(**given)


def budget_machines(values: flags.FlagValues) -> list[Topology]:
    """Returns the machines of --topology, or all that have a list price."""
    return search.named_machines(values.topology) if values.topology else search.priced_machines()


_ONLY_HERE = (*declared(JobOptions), "plan")
# These apply to --budget as well.
SHARED = ("failures", "checkpoint_rate", "restart")
_NOT_HERE = ("generate", "search")
# Flags that a plan from a file already answers.
_NOT_WITH_A_FILE = (
    *("experiment", "config", "gin_param", "gin_file", "topology", "mesh", "strategy"),
    *("device_order", "partitioner", "calibration", "remedies"),
)


# --goodput and the flags that only apply to it.
GOODPUT_FLAGS: Flags = dict(
    goodput=switch(
        "Plans the whole training of --tokens with failures, checkpoints and restarts: the "
        "best checkpoint interval, goodput, days and price."
    ),
    plan="A plan that --json wrote, with --goodput: in place of --experiment and --topology.",
    **option_flags(JobOptions(tokens=1.0)),
)


def check_goodput_flags(values: flags.FlagValues) -> None:
    """Raises ValueError if flags are missing, mixed with other plans', or not in their range."""
    if not values.goodput:
        allowed = () if values.budget is None else SHARED
        names = [name for name in _ONLY_HERE if name not in allowed]
        refuse(values, names, "applies to --goodput, which is not given")
        return
    refuse(values, _NOT_HERE, "does not apply to --goodput; give one of them")
    if values.plan:
        why = f"does not apply to --plan={values.plan}; give one of them"
        refuse(values, _NOT_WITH_A_FILE, why)
    if values.tokens is None:
        raise UserError("--goodput needs --tokens, the tokens to train on, such as 1e12")
    job_options(values)


def job_options(values: flags.FlagValues) -> JobOptions:
    """Returns the options that the flags give."""
    return JobOptions(tokens=values.tokens, **given_options(values, JobOptions))
