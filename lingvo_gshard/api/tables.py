"""Prints tables so that no cell is cut or emptied, however narrow the terminal is."""

from __future__ import annotations

import typing
from collections.abc import Iterable

import rich.box
import rich.console
import rich.measure
import rich.padding
import rich.table
import rich.text

if typing.TYPE_CHECKING:
    from lingvo_gshard.tasks import Table

# The width for a terminal that does not state its width, and a width that no table exceeds.
_USUAL, _UNLIMITED = 80, 10_000
# In fewer columns, a heading with its cell would be wrapped at most words.
_LEAST_STACKED = 40
_INDENT = 2


def print_table(console: rich.console.Console, table: rich.table.Table) -> None:
    """Prints a table that fits the width of the terminal, or the environment variable COLUMNS.

    Words are not split. A table whose longest words need more columns than a terminal has loses its
    frame or, if that is not enough, is printed row by row, with a line for each cell. In a terminal
    too narrow for that, and in files, it is as wide as it needs to be.
    """
    if console.width < 1:
        # rich prints nothing on a terminal without columns.
        console.width = _USUAL
    options = console.options.update(width=_UNLIMITED)
    least = rich.measure.Measurement.get(console, options, table).minimum
    if least > console.width >= _LEAST_STACKED:
        table.box, table.pad_edge, table.show_edge = rich.box.SIMPLE_HEAD, False, False
        table.collapse_padding = True
        least = rich.measure.Measurement.get(console, options, table).minimum
    if least > console.width >= _LEAST_STACKED:
        _print_stacked(console, table)
        return
    if least > console.width:
        table.width = least
    for column in table.columns:
        # If columns share too few places, rich cuts the widest one within its words.
        cells = [column.header, *column.cells]
        widths = [rich.measure.Measurement.get(console, options, cell).minimum for cell in cells]
        column.min_width = max(widths)
    console.print(table, highlight=False, crop=False)


def print_facts(console: rich.console.Console, facts: Iterable[tuple[str, str]]) -> None:
    """Prints pairs of a name and a text, one below the other."""
    table = rich.table.Table.grid(padding=(0, 2))
    for name, text in facts:
        table.add_row(name, text)
    print_table(console, table)


def _print_stacked(console: rich.console.Console, table: rich.table.Table) -> None:
    """Prints each row as its first cell, and a line with the heading for each other cell."""
    first, *others = table.columns
    for title, *cells in zip(first.cells, *(column.cells for column in others), strict=True):
        console.print(_as_text(console, title), style="bold", highlight=False)
        for column, cell in zip(others, cells, strict=True):
            head, text = _as_text(console, column.header), _as_text(console, cell)
            if text.plain.strip():
                line = rich.text.Text.assemble(head, ": " if head.plain else "", text)
                padded = rich.padding.Padding(line, (0, 0, 0, _INDENT))
                console.print(padded, highlight=False)


def _as_text(console: rich.console.Console, cell: rich.console.RenderableType) -> rich.text.Text:
    """Returns a cell as text, with the styles of its markup."""
    if not isinstance(cell, str):
        return rich.text.Text(" ".join(str(cell).split()))
    return console.render_str(" ".join(cell.split()))


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
