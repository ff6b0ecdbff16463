"""Flags of gshard-plan --budget, and what they ask for."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.training import job
from lingvo_gshard.planning.training.budget import laws, options
from lingvo_gshard.planning.training.budget.options import BudgetOptions

_ONLY_HERE = ("days", "law", "mfu", "state_bytes")
_NOT_HERE = (
    *("experiment", "config", "plan", "goodput", "generate", "search"),
    *("mesh", "strategy", "html"),
)


def define_budget_flags(values: flags.FlagValues) -> None:
    """Defines --budget and the flags that only apply to it."""
    flags.DEFINE_float(
        "budget",
        None,
        "Money in USD: searches model size, experts, tokens (at most --tokens) and machine (of "
        "--topology, else all with a list price) for the lowest loss by a scaling law.",
        flag_values=values,
    )
    flags.DEFINE_float("days", options.DAYS, "Longest training, with --budget.", flag_values=values)
    flags.DEFINE_string(
        "law",
        BudgetOptions.law,
        f"Scaling law, with --budget: {', '.join(laws.LAWS)}.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "mfu",
        None,
        f"MFU of all models, with --budget. Unless given, {options.DENSE_MFU:.2g} for dense models "
        f"and {options.SPARSE_MFU:.2g} for those with experts.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "state_bytes",
        options.STATE_BYTES,
        "Bytes of weight, gradient and moments for each weight, with --budget.",
        flag_values=values,
    )


def check_budget_flags(values: flags.FlagValues) -> None:
    """Raises ValueError if flags are mixed with those of other plans or not in their range."""
    if values.budget is None:
        for name in _ONLY_HERE:
            if values[name].present:
                raise UserError(
                    f"--{name}={values[name].value} applies to --budget, which is not given"
                )
        return
    for name in _NOT_HERE:
        if values[name].present and values[name].value:
            raise UserError(
                f"--{name}={values[name].value} does not apply to --budget; give one of them"
            )
    options.check(budget_options(values))


def budget_options(values: flags.FlagValues) -> BudgetOptions:
    """Returns the options that the flags give."""
    is_given = values.mfu is not None
    return BudgetOptions(
        budget=values.budget,
        days=values.days,
        tokens=values.tokens,
        law=values.law,
        dense_mfu=values.mfu if is_given else options.DENSE_MFU,
        sparse_mfu=values.mfu if is_given else options.SPARSE_MFU,
        state_bytes=values.state_bytes,
        failures=values.failures,
        checkpoint_rate=_or(values.checkpoint_rate, job.HOST_RATE),
        restart=_or(values.restart, job.RESTART),
    )


def budget_machines(values: flags.FlagValues) -> list[Topology]:
    """Returns the machines of --topology, or all that have a list price."""
    return options.named_machines(values.topology) if values.topology else options.priced_machines()


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
