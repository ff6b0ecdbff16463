"""Prints what to train for a budget: the best choice, its neighbors, and what decides."""

from __future__ import annotations

from collections.abc import Sequence

import rich.console

from lingvo_gshard.planning.training.budget.record import BudgetPlan, Choice, Sensitivity
from lingvo_gshard.planning.training.record import Assumption
from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.plan_reports.layout import make_table, print_table, say

_PARTS = ("machine", "experts", "size")


def print_budget(plan: BudgetPlan, console: rich.console.Console) -> None:
    """Prints what to train for a budget."""
    best = plan.best
    say(
        console,
        f"For {units.in_large(plan.budget)} {plan.currency}: {units.in_large(best.total)} weights "
        f"({units.in_large(best.active)} active, {best.experts}) on "
        f"{units.in_large(best.tokens)} tokens, on {best.topology} in "
        f"{units.digits(best.days)} days.",
        style="bold",
    )
    say(
        console,
        f"{best.layers} layers, model_dim {best.model_dim:,}; loss {best.loss:.3f} by the law "
        f"{plan.law}; goodput {best.goodput:.1%}; {units.in_large(best.price)} {plan.currency}.",
    )
    say(console, f"  {plan.source}")
    _print_choices(console, "best on each chip", plan.machines)
    _print_choices(console, "best with each number of experts", plan.experts)
    _print_choices(console, "smaller and larger models", plan.sizes)
    _print_sensitivities(console, plan.sensitivities)
    say(console, "\nAssumptions:")
    for row in plan.assumptions:
        say(console, f"  {row.name} (--{row.flag}): {_value(row)}; {row.source}")
    for note in plan.notes:
        say(console, f"Note: {note}")


def _print_choices(console: rich.console.Console, title: str, rows: Sequence[Choice]) -> None:
    table = make_table(title, "experts", right=("active", "total", "tokens", "days", "loss"))
    for row in rows:
        table.add_row(
            row.topology,
            row.experts,
            _short(row.active),
            _short(row.total),
            _short(row.tokens),
            units.digits(row.days),
            f"{row.loss:.3f}",
        )
    print_table(console, table)


def _print_sensitivities(console: rich.console.Console, rows: Sequence[Sensitivity]) -> None:
    table = make_table("with", "best choice", right=("active", "loss"))
    table.add_column("decides", overflow="fold")
    for row in rows:
        change = row.loss_change
        table.add_row(
            row.change,
            f"{row.choice.topology}, {row.choice.experts}" if row.choice else "none",
            _short(row.choice.active) if row.choice else units.MISSING,
            units.MISSING if change is None else f"{change:+.3f}",
            ", ".join(row.decides),
        )
    print_table(console, table)
    for part in _PARTS:
        deciding = [row.change for row in rows if part in row.decides]
        what = "; ".join(deciding) if deciding else "none of these assumptions"
        say(console, f"What decides the {part}: {what}.")


def _short(value: float) -> str:
    """Returns a large number with a letter, such as `46.3B`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size * 0.9995:
            return f"{units.digits(value / size)}{letter}"
    return units.digits(value)


def _value(row: Assumption) -> str:
    if row.unit == "share":
        return units.in_share(row.value)
    if row.unit == "bytes/s":
        return f"{units.digits(row.value / 1e9)} GB/s"
    return f"{units.digits(row.value)} {row.unit}"
