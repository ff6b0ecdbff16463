"""Prints tables so that no cell is cut or emptied, however narrow the terminal is."""

from __future__ import annotations

import rich.console
import rich.measure
import rich.table

# The width of a terminal that does not say it, and one that no table needs.
_USUAL, _UNLIMITED = 80, 10_000


def print_table(console: rich.console.Console, table: rich.table.Table) -> None:
    """Prints a table as wide as its longest words need, even if the terminal is narrower.

    The width is that of the terminal, or what COLUMNS in the environment says.
    """
    if console.width < 1:
        # rich prints nothing on a terminal without columns.
        console.width = _USUAL
    options = console.options.update(width=_UNLIMITED)
    least = rich.measure.Measurement.get(console, options, table).minimum
    if least > console.width:
        table.width = least
    console.print(table, highlight=False, crop=False)
