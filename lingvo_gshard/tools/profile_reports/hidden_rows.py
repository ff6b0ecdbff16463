"""Says what a shortened table of a profile leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import rich.console

from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.plan_reports.layout import MAX_ROWS, say

_Row = TypeVar("_Row")


def say_hidden(
    console: rich.console.Console,
    rows: Sequence[_Row],
    seconds_of: Callable[[_Row], float],
    file: str,
) -> None:
    """Prints how many rows a table leaves out, the sum of their seconds, and the file with all."""
    hidden = rows[MAX_ROWS:]
    if hidden:
        total = units.in_seconds(sum(map(seconds_of, hidden)))
        say(console, f"and {len(hidden)} more, {total}; {file} has them all")
