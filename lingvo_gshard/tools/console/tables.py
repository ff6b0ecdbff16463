"""Tables that the commands print: their layout, text without markup, shortened lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from lingvo_gshard.api import tables
from lingvo_gshard.tools.console.output import say

# Longer lists are cut; the JSON has all rows.
MAX_ROWS = 12


def make_table(
    *left: str, right: Sequence[str] = (), title: str | None = None, caption: str | None = None
) -> rich.table.Table:
    """Returns an empty table.

    Args:
      left: headings of left-aligned columns.
      right: headings of the right-aligned columns after them.
      title: a line above the table.
      caption: lines below it.
    """
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        title=title and rich.text.Text(title),
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True, overflow="fold")
    return table


def print_table(console: rich.console.Console, table: rich.table.Table) -> None:
    """Prints an empty line and a table."""
    say(console, "")
    tables.print_table(console, table)


def print_rows(
    console: rich.console.Console,
    left: Sequence[str],
    right: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str | None = None,
) -> None:
    """Prints rows below the headings of left-aligned, then of right-aligned columns."""
    table = make_table(*left, right=right, caption=caption)
    for row in rows:
        table.add_row(*row)
    print_table(console, table)


def say_hidden(
    console: rich.console.Console,
    hidden: Sequence[Any],
    size: Callable[[Any], float] | None = None,
    in_words: Callable[[float], str] = str,
    where: str = "--json",
) -> None:
    """Prints how many rows a shortened table leaves out.

    Args:
      size: the size of a row; with it, the sum of the sizes is printed, too.
      in_words: writes that sum.
      where: what has all rows.
    """
    if hidden:
        total = f", {in_words(sum(map(size, hidden)))}" if size else ""
        say(console, f"and {len(hidden):,} more{total}; {where} has them all")


def array_text(dtype: str, shape: Sequence[int]) -> str:
    """Returns an array's type as XLA writes it, such as float32[8,128]."""
    return f"{dtype}[{','.join(map(str, shape))}]"
