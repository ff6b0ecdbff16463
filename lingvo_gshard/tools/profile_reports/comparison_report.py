"""Prints predicted beside measured times of a step."""

from __future__ import annotations

from collections.abc import Sequence

import rich.console

from lingvo_gshard.profiling.comparison import Comparison, PartComparison
from lingvo_gshard.profiling.files import COMPARISON
from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.plan_reports.layout import (
    MAX_ROWS,
    escape,
    make_table,
    print_table,
    say,
)
from lingvo_gshard.tools.profile_reports.hidden_rows import say_hidden

_NUMBERS = ("predicted", "measured", "measured by predicted")


def print_comparison(comparison: Comparison, console: rich.console.Console) -> None:
    """Prints the comparison by kind of work and by layer."""
    table = make_table("plan and profile", right=_NUMBERS)
    for row in comparison.kinds:
        table.add_row(row.part, *_cells(row.predicted, row.measured))
    table.add_section()
    predicted = sum(row.predicted for row in comparison.kinds)
    measured = sum(row.measured for row in comparison.kinds)
    table.add_row("all operations", *_cells(predicted, measured))
    table.add_row("step", *_cells(comparison.predicted, comparison.measured))
    print_table(console, table)
    _print_layers(console, comparison.layers)
    say(
        console,
        "\nA plan knows neither waiting for input, nor pauses between operations, nor the host.",
    )


def _print_layers(console: rich.console.Console, rows: Sequence[PartComparison]) -> None:
    table = make_table("plan and profile of a layer", "phase", right=_NUMBERS)
    for row in rows[:MAX_ROWS]:
        cells = _cells(row.predicted, row.measured)
        table.add_row(escape(row.part or "(no layer)"), row.phase, *cells)
    print_table(console, table)
    say_hidden(console, rows, lambda row: row.measured, COMPARISON)


def _cells(predicted: float, measured: float) -> tuple[str, str, str]:
    ratio = f"{units.digits(measured / predicted)}x" if predicted else ""
    return units.in_seconds(predicted), units.in_seconds(measured), ratio
