"""Tables of a plan's collectives, arithmetic and layer times."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import rich.console

from lingvo_gshard.planning.plan.plan import CollectiveRow, FlopCounts, LayerRow
from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.plan_reports.layout import (
    MAX_ROWS,
    escape,
    make_table,
    print_table,
    say,
    say_hidden,
)


def print_collectives(console: rich.console.Console, collectives: Sequence[CollectiveRow]) -> None:
    """Prints the collectives that take the most time, then sums by kind and axis."""
    if not collectives:
        say(console, "\nNo collectives.")
        return
    table = make_table("collective", right=("one call", "calls", "bound", "estimate", "share"))
    rows = sorted(collectives, key=lambda row: -row.seconds)
    for row in rows[:MAX_ROWS]:
        table.add_row(
            escape(
                f"{row.kind} over {row.axis}, {row.dtype}\n"
                f"  {row.layer or '(no layer)'}, {row.phase}"
            ),
            units.in_bytes(row.bytes),
            *_call_cells([row]),
        )
    table.add_section()
    groups: dict[tuple[str, str], list[CollectiveRow]] = collections.defaultdict(list)
    for row in rows:
        groups[row.kind, row.axis].append(row)
    for (kind, axis), group in groups.items():
        total = units.in_bytes(sum(row.bytes * row.count for row in group))
        table.add_row(escape(f"{kind} over {axis}: {total} a step"), "", *_call_cells(group))
    print_table(console, table)
    say_hidden(console, rows, lambda row: row.seconds, units.in_seconds)


def _call_cells(rows: Sequence[CollectiveRow]) -> tuple[str, ...]:
    """Returns the number of calls, their bound, their estimate and their share, as text."""
    return (
        units.in_count(sum(row.count for row in rows)),
        units.in_seconds(sum(row.seconds_bound for row in rows)),
        units.in_seconds(sum(row.seconds for row in rows)),
        units.in_share(sum(row.share for row in rows)),
    )


def print_arithmetic(console: rich.console.Console, flops: FlopCounts) -> None:
    """Prints what the executed operations are for."""
    table = make_table("arithmetic of one device", right=("per step", "of executed"))
    names = ("useful", "rematerialized", "dispatch", "padding")
    parts = {name: getattr(flops, name) for name in names}
    rest = flops.executed - sum(parts.values())
    if rest > flops.executed * 1e-6:
        parts["other"] = rest
    for name, value in parts.items():
        share = value / (flops.executed or 1)
        table.add_row(name, units.in_flops(value), units.in_share(share))
    table.add_section()
    table.add_row("executed", units.in_flops(flops.executed), "")
    print_table(console, table)


def print_layer_times(console: rich.console.Console, layers: Sequence[LayerRow]) -> None:
    """Prints the layers that take the most time, then sums by phase."""
    if not layers:
        return
    table = make_table(
        "time of a layer", "phase", right=("times", "bound", "estimate", "share", "limited by")
    )
    total = sum(row.seconds for row in layers) or 1
    rows = sorted(layers, key=lambda row: -row.seconds)
    for row in rows[:MAX_ROWS]:
        table.add_row(
            escape(row.layer or "(no layer)"),
            row.phase,
            units.in_count(row.times),
            units.in_seconds(row.seconds_bound),
            units.in_seconds(row.seconds),
            units.in_share(row.seconds / total),
            _bottleneck(row),
        )
    table.add_section()
    for phase in dict.fromkeys(row.phase for row in layers):
        group = [row for row in layers if row.phase == phase]
        bound, seconds = (sum(r.seconds_bound for r in group), sum(r.seconds for r in group))
        cells = (units.in_seconds(bound), units.in_seconds(seconds))
        table.add_row("all", phase, "", *cells, units.in_share(seconds / total), "")
    print_table(console, table)
    say_hidden(console, rows, lambda row: row.seconds, units.in_seconds)


def _bottleneck(row: LayerRow) -> str:
    """Returns the resource whose lower bound is largest."""
    bounds = {
        "compute": row.compute_seconds,
        "memory": row.memory_seconds,
        "network": row.communication_seconds,
    }
    return max(bounds, key=bounds.__getitem__)
