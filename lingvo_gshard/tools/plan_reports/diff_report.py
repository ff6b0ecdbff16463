"""Prints the differences between two plans."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console

from lingvo_gshard.planning.plan.diff import Change, is_number
from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.plan_reports.layout import say

_UNITS: dict[str, Callable[[Any], str]] = {
    "bytes": units.in_bytes,
    "seconds": units.in_seconds,
    "flops": units.in_flops,
    "count": units.in_count,
    "number": units.in_large,
    "rate": units.in_large,
    "share": units.in_share,
}
# The report is no wider than this, also in a file or on a wider terminal.
_WIDEST = 100
# Values of more characters have lines of their own instead of cells.
_LONGEST_CELL = 20
_GAP = 2
_HEADINGS = ("before", "after", "ratio")

Cells = tuple[str, str, str, str]


def print_diff(changes: Sequence[Change], console: rich.console.Console) -> None:
    """Prints the changes of each section: numbers as a table, long texts on lines of their own."""
    if not changes:
        say(console, "Nothing changed.")
    width = min(console.width, _WIDEST)
    for index, (section, group) in enumerate(itertools.groupby(changes, lambda c: c.section)):
        if index:
            say(console, "")
        for line in _lines(section, list(group), width):
            say(console, line)


def _lines(section: str, changes: Sequence[Change], width: int) -> Iterator[str]:
    """Yields the lines of a section, none of them wider than `width`."""
    cells = [_cells(change) for change in changes]
    short = [row for row in cells if _is_short(row)]
    sizes = [
        max(map(len, column)) for column in zip(_HEADINGS, *(r[1:] for r in short), strict=True)
    ]
    room = width - sum(sizes) - _GAP * len(sizes)
    names = [section, *(row[0] for row in short)]
    label = min(max(map(len, names)), room)
    yield _row((section, *_HEADINGS), label, sizes)
    yield "─" * (label + sum(sizes) + _GAP * len(sizes))
    for what, group in itertools.groupby(zip(changes, cells, strict=True), lambda c: c[0].what):
        items = list(group)
        if items[0][0].field:
            yield from _wrapped(what, width)
        for _, row in items:
            yield from _change_lines(row, label, sizes, width)


def _change_lines(row: Cells, label: int, sizes: Sequence[int], width: int) -> Iterator[str]:
    """Yields the lines of one change."""
    if _is_short(row):
        *above, last = _wrapped(row[0], label)
        yield from above
        yield _row((last, *row[1:]), label, sizes)
        return
    yield from _wrapped(row[0], width)
    indent = len(row[0]) - len(row[0].lstrip()) + 2
    is_in_one = units.MISSING in row[1:3]
    for heading, text in zip(_HEADINGS, row[1:3], strict=False):
        if text != units.MISSING:
            start = f"{'':{indent}}{'only ' * is_in_one}{heading:<6}  "
            yield from _wrapped(start + text, width, hanging=len(start))


def _cells(change: Change) -> Cells:
    """Returns a change's name, indented if it is a field, its values and their ratio, as text."""
    name = f"  {change.field}" if change.field else change.what
    ratio = f"x{units.digits(change.ratio)}" if change.ratio is not None else ""
    # The value of a note is its own name.
    before, after = (
        "present" if value == change.what else value_text(value, change.unit)
        for value in (change.before, change.after)
    )
    return name, before, after, ratio


def _is_short(row: Cells) -> bool:
    return max(len(row[1]), len(row[2])) <= _LONGEST_CELL


def _row(cells: Sequence[str], label: int, sizes: Sequence[int]) -> str:
    values = (f"{cell:>{size + _GAP}}" for cell, size in zip(cells[1:], sizes, strict=True))
    return f"{cells[0]:<{label}}{''.join(values)}".rstrip()


def _wrapped(text: str, width: int, hanging: int | None = None) -> list[str]:
    """Returns the lines of a text. Those after the first begin at column `hanging`."""
    indent = len(text) - len(text.lstrip())
    return textwrap.wrap(
        text.strip(),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2 if hanging is None else hanging),
        break_on_hyphens=False,
    )


def value_text(value: Any, unit: str) -> str:
    """Returns a value as text.

    Args:
      value: a number, a bool, a text or None.
      unit: unit of a number, as in `Change.unit`.
    """
    if value is None:
        return units.MISSING
    if unit in _UNITS and is_number(value):
        return _UNITS[unit](value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
