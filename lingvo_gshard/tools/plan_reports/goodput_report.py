"""Prints the whole training: goodput, days and price, and the assumptions behind them."""

from __future__ import annotations

from collections.abc import Sequence

import rich.console

from lingvo_gshard.planning.training.record import Alternative, Assumption, Goodput, Range
from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.plan_reports.layout import make_table, print_table, say

_DAY = 24 * 3600
_LONG = ((_DAY, "days"), (3600, "h"), (60, "min"))


def print_goodput(goodput: Goodput, console: rich.console.Console) -> None:
    """Prints what a training takes with its failures."""
    found = goodput.goodput
    say(
        console,
        f"\nThe whole training: {units.digits(goodput.days.mean)} days, goodput "
        f"{units.in_fine_share(found.mean)}, {_price(goodput.price, goodput.currency)}.",
        style="bold",
    )
    say(
        console,
        f"{units.in_large(goodput.tokens)} tokens are {units.in_large(goodput.steps)} steps: "
        f"{units.digits(goodput.days_without_failures)} days without failures, "
        f"{units.digits(goodput.days_bound)} at the bound of the step's time.",
    )
    say(
        console,
        f"A chip of {goodput.chips:,} fails every {duration(goodput.between_failures)}: about "
        f"{units.in_large(goodput.failures.mean)} failures. A restart takes "
        f"{duration(goodput.restart)}.",
    )
    say(
        console,
        f"Checkpoints of {units.in_bytes(goodput.checkpoint_bytes)} stop the training for "
        f"{duration(goodput.stall)} and are written in {duration(goodput.write)}.",
    )
    say(
        console,
        f"Save every {units.in_count(goodput.interval_steps)} steps "
        f"({duration(goodput.interval)}): --gin_param='run.checkpoint_every_steps = "
        f"{goodput.interval_steps}'. Young's formula says {duration(goodput.young_interval)}, "
        f"Daly's {duration(goodput.daly_interval)}.",
    )
    _print_ranges(console, goodput)
    _print_assumptions(console, goodput.assumptions)
    _print_alternatives(console, "with the published rate", goodput.published_rates)
    _print_alternatives(console, "with", goodput.sensitivities)
    first, second = goodput.sensitivities[:2]
    low, high = map(units.in_fine_share, sorted((first.goodput, second.goodput)))
    say(console, f"Goodput depends most on --{first.flag}: {low} to {high}.")


def duration(seconds: float) -> str:
    """Returns seconds in the largest unit of which there is at least one, such as `3.1 h`."""
    for size, unit in _LONG:
        if seconds >= size:
            return f"{units.digits(seconds / size)} {unit}"
    return units.in_seconds(seconds)


def _print_ranges(console: rich.console.Console, goodput: Goodput) -> None:
    table = make_table(f"{goodput.runs:,} simulated runs", right=("mean", "5%", "median", "95%"))
    rows = [
        ("goodput", goodput.goodput, units.in_fine_share),
        ("days", goodput.days, units.digits),
        ("failures", goodput.failures, units.in_large),
    ]
    if goodput.price:
        rows.append((f"price, {goodput.currency}", goodput.price, units.in_large))
    for name, values, text in rows:
        table.add_row(name, *map(text, (values.mean, values.low, values.median, values.high)))
    print_table(console, table)
    say(
        console,
        f"Of the time, {_small_share(goodput.saving_share)} is waiting for checkpoints, "
        f"{_small_share(goodput.lost_share)} work that failures undo, and "
        f"{_small_share(goodput.restarting_share)} restarts. Daly's closed formula has a goodput "
        f"of {goodput.formula_goodput:.2%}, the simulation {goodput.goodput.mean:.2%}.",
    )


def _print_assumptions(console: rich.console.Console, rows: Sequence[Assumption]) -> None:
    say(console, "\nAssumptions, which no compiler can tell:")
    for row in rows:
        say(console, f"  {row.name} (--{row.flag}): {_value(row)}; {row.source}")


def _print_alternatives(
    console: rich.console.Console, title: str, rows: Sequence[Alternative]
) -> None:
    table = make_table(title, right=("save every", "goodput", "days", "price"))
    for row in rows:
        table.add_row(
            row.change,
            duration(row.interval),
            units.in_fine_share(row.goodput),
            units.digits(row.days),
            units.in_large(row.price),
        )
    print_table(console, table)


def _value(row: Assumption) -> str:
    if row.unit == "seconds":
        return duration(row.value)
    if row.unit == "bytes/s":
        return f"{units.digits(row.value / 1e9)} GB/s"
    return f"{units.in_large(row.value)} {row.unit}"


def _price(price: Range | None, currency: str | None) -> str:
    if price is None:
        return "no price is published"
    return f"{units.in_large(price.mean)} {currency}"


def _small_share(value: float) -> str:
    return f"{value:.2%}" if value < 0.01 else units.in_share(value)
