"""Tables of a plan's memory: classes, layers, weights and moments, temporaries."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from rich.markup import escape

from lingvo_gshard.tools.console import MAX_ROWS, Console, array_text, make_table, units
from lingvo_gshard.wings.planning.plan import plan

_BAR_WIDTH = 30
_CLASS_NAMES = {"activations": "activations, temporaries"}
_KINDS = ("weights", "moments")


def print_memory(console: Console, memory: plan.MemoryBytes) -> None:
    """Prints the memory of one device by class, with bars."""
    table = make_table("memory of one device", right=("bytes", "of capacity"))
    table.add_column("", no_wrap=True)
    capacity = memory.capacity or 1

    def add(name: str, size: int) -> None:
        share = size / capacity
        bar = "█" * min(round(share * _BAR_WIDTH), _BAR_WIDTH) or ("▏" if size else "")
        table.add_row(name, units.in_bytes(size), units.in_share(share), bar)

    sizes = {name: getattr(memory, name) for name in plan.MEMORY_CLASSES}
    for name, size in sizes.items():
        add(_CLASS_NAMES.get(name, name), size)
    rest = memory.peak - sum(sizes.values())
    if rest > 0:
        add("unclassified", rest)
    elif rest < 0:
        table.add_row("not alive at the peak", f"-{units.in_bytes(-rest)}", "", "")
    table.add_section()
    add("peak", memory.peak)
    table.add_row("capacity", units.in_bytes(memory.capacity), "", "")
    if memory.host:
        table.add_row("in the host's memory", units.in_bytes(memory.host), "", "")
    console.print_table(table)


def print_layer_sizes(console: Console, tensors: Sequence[plan.TensorRow]) -> None:
    """Prints the bytes of each layer's weights and moments on one device, largest first."""
    by_layer: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in tensors:
        by_layer[row.layer][row.kind] += row.bytes_per_device
    if not by_layer:
        return
    rows = sorted(by_layer.items(), key=lambda item: -item[1].total())

    def cells(name: str, sizes: Sequence[collections.Counter[str]]) -> list[str]:
        parts = [sum(size[kind] for size in sizes) for kind in _KINDS]
        return [escape(name), *map(units.in_bytes, (*parts, sum(parts)))]

    shown = [cells(layer or "(no layer)", [sizes]) for layer, sizes in rows[:MAX_ROWS]]
    if rest := [sizes for _, sizes in rows[MAX_ROWS:]]:
        shown.append(cells(f"and {len(rest)} more", rest))
    right = ("weights", "moments", "per device")
    total = cells("all", [sizes for _, sizes in rows])
    console.print_rows(("weights and moments of a layer",), right, shown, below=[total])


def print_tensors(console: Console, tensors: Sequence[plan.TensorRow]) -> None:
    """Prints the largest weights and moments with their shardings."""
    if not tensors:
        console.say("\nThe step keeps no weights or moments.")
        return
    rows, cells = sorted(tensors, key=lambda row: -row.bytes_per_device), []
    for row in rows[:MAX_ROWS]:
        name = f"{row.path} ({row.kind})\n  {row.layout} {array_text(row.dtype, row.shape)}"
        sizes = map(units.in_bytes, (row.bytes, row.bytes_per_device))
        cells.append((escape(name), escape(row.split), *sizes))
    console.print_rows(("tensor", "split"), ("bytes", "per device"), cells)
    console.say_hidden(rows[MAX_ROWS:], lambda row: row.bytes_per_device, units.in_bytes)


def print_temporaries(console: Console, rows: Sequence[plan.TemporaryRow]) -> None:
    """Prints the largest temporaries."""
    if not rows:
        return
    rows = sorted(rows, key=lambda row: -row.bytes)
    cells = [
        (*map(escape, (r.name, r.layer, array_text(r.dtype, r.shape))), units.in_bytes(r.bytes))
        for r in rows[:MAX_ROWS]
    ]
    console.print_rows(("largest temporaries", "layer", "shape"), ("bytes",), cells)
    console.say_hidden(rows[MAX_ROWS:], lambda row: row.bytes, units.in_bytes)


def print_collectives(console: Console, collectives: Sequence[plan.CollectiveRow]) -> None:
    """Prints the collectives that expose the most time, then sums by kind and axis.

    Computation hides a part of a collective's estimate. The step waits for the exposed rest.
    """
    if not collectives:
        console.say("\nNo collectives.")
        return
    cells, sums = [], []
    rows = sorted(collectives, key=lambda row: (-row.seconds, -row.hidden_seconds))
    for row in rows[:MAX_ROWS]:
        name = (
            f"{row.kind} over {row.axis}, {row.dtype}\n  {row.layer or '(no layer)'}, {row.phase}"
        )
        name += f"\n  {row.line}" if row.line else ""
        figures = (*_call_cells([row]), units.in_share(row.share))
        cells.append((escape(name), units.in_bytes(row.bytes), *figures))
    groups: dict[tuple[str, str], list[plan.CollectiveRow]] = collections.defaultdict(list)
    for row in rows:
        groups[row.kind, row.axis].append(row)
    for (kind, axis), group in groups.items():
        total = units.in_bytes(sum(row.bytes * row.count for row in group))
        figures = (*_call_cells(group), units.in_share(sum(row.share for row in group)))
        sums.append((escape(f"{kind} over {axis}: {total} a step"), "", *figures))
    right = ("one call", "calls", "bound", "hidden", "exposed", "share")
    console.print_rows(("collective",), right, cells, below=sums)
    console.say_hidden(rows[MAX_ROWS:], lambda row: row.seconds, units.in_seconds)


def _call_cells(rows: Sequence[plan.CollectiveRow | plan.HostTransferRow]) -> tuple[str, ...]:
    """Returns the number of calls, and their bound, hidden and exposed time, as text."""
    names = ("seconds_bound", "hidden_seconds", "seconds")
    seconds = (sum(getattr(row, name) for row in rows) for name in names)
    return units.in_count(sum(row.count for row in rows)), *map(units.in_seconds, seconds)


def print_host_transfers(console: Console, transfers: Sequence[plan.HostTransferRow]) -> None:
    """Prints the copies between device and host; nothing without any."""
    if not transfers:
        return
    cells = []
    for row in transfers[:MAX_ROWS]:
        what = f"{'to the host' if row.to_host else 'from the host'}, {row.phase}"
        layer = escape(row.layer or "(no layer)")
        cells.append((what, layer, units.in_bytes(row.bytes), *_call_cells([row])))
    right = ("bytes", "calls", "bound", "hidden", "exposed")
    console.print_rows(("copies", "layer"), right, cells)
    console.say_hidden(transfers[MAX_ROWS:], lambda row: row.seconds, units.in_seconds)


def print_arithmetic(console: Console, flops: plan.FlopCounts) -> None:
    """Prints what the executed operations are for."""
    names = ("useful", "rematerialized", "dispatch", "optimizer", "padding")
    parts = {name: getattr(flops, name) for name in names}
    rest = flops.executed - sum(parts.values())
    if rest > flops.executed * 1e-6:
        parts["other"] = rest
    cells = [
        (name, units.in_flops(value), units.in_share(value / (flops.executed or 1)))
        for name, value in parts.items()
    ]
    executed = ("executed", units.in_flops(flops.executed), "")
    right = ("per step", "of executed")
    console.print_rows(("arithmetic of one device",), right, cells, below=[executed])


def print_layer_times(console: Console, layers: Sequence[plan.LayerRow]) -> None:
    """Prints the layers that take the most time, then sums by phase."""
    if not layers:
        return
    total = sum(row.seconds for row in layers) or 1
    rows, sums = sorted(layers, key=lambda row: -row.seconds), []
    cells = [
        (
            *(escape(row.layer or "(no layer)"), row.phase, units.in_count(row.times)),
            *map(units.in_seconds, (row.seconds_bound, row.seconds)),
            *(units.in_share(row.seconds / total), _bottleneck(row)),
        )
        for row in rows[:MAX_ROWS]
    ]
    for phase in dict.fromkeys(row.phase for row in layers):
        group = [row for row in layers if row.phase == phase]
        bound, seconds = (sum(r.seconds_bound for r in group), sum(r.seconds for r in group))
        times = map(units.in_seconds, (bound, seconds))
        sums.append(("all", phase, "", *times, units.in_share(seconds / total), ""))
    right = ("times", "bound", "estimate", "share", "limited by")
    console.print_rows(("time of a layer", "phase"), right, cells, below=sums)
    console.say_hidden(rows[MAX_ROWS:], lambda row: row.seconds, units.in_seconds)


def _bottleneck(row: plan.LayerRow) -> str:
    """Returns the resource whose lower bound is largest."""
    fields = {"compute": "compute", "memory": "memory", "network": "communication"}
    return max(fields, key=lambda name: getattr(row, f"{fields[name]}_seconds"))
