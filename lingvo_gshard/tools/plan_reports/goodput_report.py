"""Prints the whole training: goodput, days and price, and the assumptions behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.tools.console import Console, units
from lingvo_gshard.wings.planning.training import goodput_record


def print_budget(plan: goodput_record.BudgetPlan, console: Console) -> None:
    """Prints what to train for a budget."""
    best = plan.best
    console.say(
        f"For {units.in_large(plan.budget)} {plan.currency}: {units.in_large(best.total)} weights "
        f"({units.in_large(best.active)} active, {best.experts}) on "
        f"{units.in_large(best.tokens)} tokens, on {best.topology} in "
        f"{units.digits(best.days)} days.",
        style="bold",
    )
    console.say(
        f"{best.layers} layers, model_dim {best.model_dim:,}; loss {best.loss:.3f} by the law "
        f"{plan.law}; goodput {best.goodput:.1%}; {units.in_large(best.price)} {plan.currency}."
    )
    console.say(f"  {plan.source}")
    _print_choices(console, "best on each chip", plan.machines)
    _print_choices(console, "best with each number of experts", plan.experts)
    _print_choices(console, "smaller and larger models", plan.sizes)
    _print_sensitivities(console, plan.sensitivities)
    console.say("\nAssumptions:")
    for row in plan.assumptions:
        console.say(f"  {row.name} (--{row.flag}): {_value(row)}; {row.source}")
    for note in plan.notes:
        console.say(f"Note: {note}")


def _print_choices(console: Console, title: str, rows: Sequence[goodput_record.Choice]) -> None:
    cells = [
        (
            row.topology,
            row.experts,
            *map(_short, (row.active, row.total, row.tokens)),
            units.digits(row.days),
            f"{row.loss:.3f}",
        )
        for row in rows
    ]
    right = ("active", "total", "tokens", "days", "loss")
    console.print_rows((title, "experts"), right, cells)


def _print_sensitivities(console: Console, rows: Sequence[goodput_record.Sensitivity]) -> None:
    cells = [
        (
            row.change,
            f"{row.choice.topology}, {row.choice.experts}" if row.choice else "none",
            _short(row.choice.active) if row.choice else units.MISSING,
            units.MISSING if row.loss_change is None else f"{row.loss_change:+.3f}",
            ", ".join(row.decides),
        )
        for row in rows
    ]
    console.print_rows(("with", "best choice"), ("active", "loss"), cells, last="decides")
    for part in ("machine", "experts", "size"):
        deciding = [row.change for row in rows if part in row.decides]
        what = "; ".join(deciding) if deciding else "none of these assumptions"
        console.say(f"What decides the {part}: {what}.")


def _short(value: float) -> str:
    """Returns a large number with a letter, such as `46.3B`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size * 0.9995:
            return f"{units.digits(value / size)}{letter}"
    return units.digits(value)


_LONG = ((24 * 3600, "days"), (3600, "h"), (60, "min"))


def print_goodput(goodput: goodput_record.Goodput, console: Console) -> None:
    """Prints what a training takes with its failures."""
    _say_totals(console, goodput)
    _say_when_to_save(console, goodput)
    _print_ranges(console, goodput)
    console.say("\nAssumptions, which no compiler can tell:")
    for row in goodput.assumptions:
        console.say(f"  {row.name} (--{row.flag}): {_value(row)}; {row.source}")
    _print_alternatives(console, "if hosts fail (--agents)", goodput.recoveries)
    _print_alternatives(console, "with the published rate", goodput.published_rates)
    _print_alternatives(console, "with", goodput.sensitivities)
    # The largest effect is first: half of an assumption and twice of it.
    option = goodput.sensitivities[0].flag
    effect = sorted(row.goodput for row in goodput.sensitivities if row.flag == option)
    low, high = map(units.in_fine_share, effect)
    console.say(f"Goodput depends most on --{option}: {low} to {high}.")


def _say_totals(console: Console, goodput: goodput_record.Goodput) -> None:
    """Says how long the training takes and what it costs, how many steps and failures it has."""
    console.say(
        f"\nThe whole training: {units.digits(goodput.days.mean)} days, goodput "
        f"{units.in_fine_share(goodput.goodput.mean)}, {_price(goodput.price, goodput.currency)}.",
        style="bold",
    )
    console.say(
        f"{units.in_large(goodput.tokens)} tokens are {units.in_large(goodput.steps)} steps: "
        f"{units.digits(goodput.days_without_failures)} days without failures, "
        f"{units.digits(goodput.days_bound)} at the bound of the step's time."
    )
    console.say(
        f"A chip of {goodput.chips:,} fails every {duration(goodput.between_failures)}: about "
        f"{units.in_large(goodput.failures.mean)} failures. A restart takes "
        f"{duration(goodput.restart)}."
    )


def _say_when_to_save(console: Console, goodput: goodput_record.Goodput) -> None:
    """Says what a checkpoint or snapshot takes, and after how many steps to save one."""
    kind, option = ("Snapshots", "snapshot") if goodput.agents else ("Checkpoints", "checkpoint")
    console.say(
        f"{kind} of {units.in_bytes(goodput.checkpoint_bytes)} stop the training for "
        f"{duration(goodput.stall)} and are written in {duration(goodput.write)}."
    )
    console.say(
        f"Save every {units.in_count(goodput.interval_steps)} steps "
        f"({duration(goodput.interval)}): --gin_param='run.{option}_every_steps = "
        f"{goodput.interval_steps}'. Young's formula says {duration(goodput.young_interval)}, "
        f"Daly's {duration(goodput.daly_interval)}."
    )


def duration(seconds: float) -> str:
    """Returns a duration in the largest unit that it fills at least once, such as `3.1 h`."""
    for size, unit in _LONG:
        if seconds >= size:
            return f"{units.digits(seconds / size)} {unit}"
    return units.in_seconds(seconds)


def _print_ranges(console: Console, goodput: goodput_record.Goodput) -> None:
    rows = [
        ("goodput", goodput.goodput, units.in_fine_share),
        ("days", goodput.days, units.digits),
        ("failures", goodput.failures, units.in_large),
    ]
    if goodput.price:
        rows.append((f"price, {goodput.currency}", goodput.price, units.in_large))
    cells = [(name, *map(text, dataclasses.astuple(values))) for name, values, text in rows]
    title, right = f"{goodput.runs:,} simulated runs", ("mean", "5%", "median", "95%")
    console.print_rows((title,), right, cells)
    console.say(
        f"Of the time, {_small_share(goodput.saving_share)} is waiting for checkpoints, "
        f"{_small_share(goodput.lost_share)} work that failures undo, and "
        f"{_small_share(goodput.restarting_share)} restarts. Daly's closed formula has a goodput "
        f"of {goodput.formula_goodput:.2%}, the simulation {goodput.goodput.mean:.2%}."
    )


def _print_alternatives(
    console: Console, title: str, rows: Sequence[goodput_record.Alternative]
) -> None:
    cells = [
        (row.change, duration(row.interval), units.in_fine_share(row.goodput))
        + (units.digits(row.days), units.in_large(row.price))
        for row in rows
    ]
    console.print_rows((title,), ("save every", "goodput", "days", "price"), cells)


def _value(row: goodput_record.Assumption) -> str:
    if row.unit == "share":
        return units.in_share(row.value)
    if row.unit == "seconds":
        return duration(row.value)
    if row.unit == "bytes/s":
        return f"{units.digits(row.value / 1e9)} GB/s"
    return f"{units.in_large(row.value)} {row.unit}"


def _price(price: goodput_record.Range | None, currency: str | None) -> str:
    return f"{units.in_large(price.mean)} {currency}" if price else "no price is published"


def _small_share(value: float) -> str:
    return f"{value:.2%}" if value < 0.01 else units.in_share(value)
