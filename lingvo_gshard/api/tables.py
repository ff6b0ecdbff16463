"""Prints tables so that no cell is cut or emptied, however narrow the terminal is."""

from __future__ import annotations

import typing

import rich.console
import rich.measure
import rich.table

if typing.TYPE_CHECKING:
    from lingvo_gshard.tasks.evaluation import Table

# The width for a terminal that does not state its width, and a width that no table exceeds.
_USUAL, _UNLIMITED = 80, 10_000


def print_table(console: rich.console.Console, table: rich.table.Table) -> None:
    """Prints a table as wide as its longest words need, even if the terminal is narrower.

    Otherwise the table fits the width of the terminal, or the environment variable COLUMNS.
    """
    if console.width < 1:
        # rich prints nothing on a terminal without columns.
        console.width = _USUAL
    options = console.options.update(width=_UNLIMITED)
    least = rich.measure.Measurement.get(console, options, table).minimum
    if least > console.width:
        table.width = least
    console.print(table, highlight=False, crop=False)


def rich_table(table: Table) -> rich.table.Table:
    """Returns a table of scores as rich prints it."""
    made = rich.table.Table()
    for index, column in enumerate(table.columns):
        made.add_column(column, justify="left" if index in table.text_columns else "right")
    for row in table.rows:
        made.add_row(*row)
    if table.summary:
        made.add_section()
        made.add_row(*table.summary, style="bold")
    return made
