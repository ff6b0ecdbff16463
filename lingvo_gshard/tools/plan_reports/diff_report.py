"""Prints the differences between two plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import rich.console
import rich.table

from lingvo_gshard.planning.plan.change import Change, is_number
from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.plan_reports.layout import escape, make_table, say

_UNITS: dict[str, Callable[[Any], str]] = {
    "bytes": units.in_bytes,
    "seconds": units.in_seconds,
    "flops": units.in_flops,
    "count": units.in_count,
    "number": units.in_large,
    "rate": units.in_large,
    "share": units.in_share,
}


def print_diff(changes: Sequence[Change], console: rich.console.Console) -> None:
    """Prints a table of changes for each section."""
    if not changes:
        say(console, "Nothing changed.")
    for index, (section, group) in enumerate(itertools.groupby(changes, lambda c: c.section)):
        if index:
            say(console, "")
        table = make_table(section, right=("before", "after", "ratio"), no_wrap=False)
        for what, changes_of_item in itertools.groupby(group, lambda c: c.what):
            _add_changes(table, what, list(changes_of_item))
        console.print(table, highlight=False)


def _add_changes(table: rich.table.Table, what: str, changes: Sequence[Change]) -> None:
    """Adds one row for an item that is a value, else a heading and one row for each field."""
    if changes[0].field:
        table.add_row(escape(what))
    for change in changes:
        ratio = f"x{units.digits(change.ratio)}" if change.ratio is not None else ""
        # The value of a note is its own name.
        before, after = (
            "present" if value == what else _text(value, change.unit)
            for value in (change.before, change.after)
        )
        table.add_row(escape(f"  {change.field}" if change.field else what), before, after, ratio)


def _text(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if unit in _UNITS and is_number(value):
        return _UNITS[unit](value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(str(value))
