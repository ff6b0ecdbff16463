"""Tables that the commands print: their layout, and how many rows they have."""

from __future__ import annotations

from collections.abc import Sequence

import rich.box
import rich.table
import rich.text

# Longer lists are cut; the JSON has all rows.
MAX_ROWS = 12


def make_table(
    *left: str, right: Sequence[str] = (), title: str | None = None, caption: str | None = None
) -> rich.table.Table:
    """Returns an empty table of left- and right-aligned columns; a caption stands below it."""
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


def array_text(dtype: str, shape: Sequence[int]) -> str:
    """Returns an array's type as XLA writes it, such as float32[8,128]."""
    return f"{dtype}[{','.join(map(str, shape))}]"
