"""Layout that the reports of gshard-plan share: tables, text without markup, shortened lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

from lingvo_gshard.api import tables
from lingvo_gshard.tools.console.output import say

# Longer lists are cut; the JSON has all rows.
MAX_ROWS = 12


def make_table(*left: str, right: Sequence[str] = (), no_wrap: bool = True) -> rich.table.Table:
    """Returns an empty table.

    Args:
      left: headings of left-aligned columns.
      right: headings of the right-aligned columns after them.
      no_wrap: keeps right-aligned cells on one line.
    """
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=no_wrap, overflow="fold")
    return table


def print_table(console: rich.console.Console, table: rich.table.Table) -> None:
    """Prints an empty line and a table."""
    say(console, "")
    tables.print_table(console, table)


def say_hidden(
    console: rich.console.Console,
    rows: Sequence[Any],
    size: Callable[[Any], float] | None = None,
    in_words: Callable[[float], str] = str,
    where: str = "--json",
) -> None:
    """Prints how many rows a shortened table leaves out.

    Args:
      console: where to.
      rows: all rows.
      size: the size of a row; with it, the sum of the sizes is printed, too.
      in_words: writes that sum.
      where: what has all rows.
    """
    hidden = rows[MAX_ROWS:]
    if hidden:
        total = f", {in_words(sum(map(size, hidden)))}" if size else ""
        say(console, f"and {len(hidden)} more{total}; {where} has them all")


def array_text(dtype: str, shape: Sequence[int]) -> str:
    """Returns an array's type as XLA writes it, such as float32[8,128]."""
    return f"{dtype}[{','.join(map(str, shape))}]"
