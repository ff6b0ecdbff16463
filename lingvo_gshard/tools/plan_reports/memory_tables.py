"""Tables of a plan's memory: classes, layers, weights and moments, temporaries."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import rich.console

from lingvo_gshard.planning.plan.plan import (
    MEMORY_CLASSES,
    MemoryBytes,
    TemporaryRow,
    TensorRow,
)
from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.plan_reports.layout import (
    MAX_ROWS,
    array_text,
    escape,
    make_table,
    print_table,
    say,
    say_hidden,
)

_BAR_WIDTH = 30
_CLASS_NAMES = {"activations": "activations, temporaries"}
_KINDS = ("weights", "moments")


def print_memory(console: rich.console.Console, memory: MemoryBytes) -> None:
    """Prints the memory of one device by class, with bars."""
    table = make_table("memory of one device", right=("bytes", "of capacity"))
    table.add_column("", no_wrap=True)
    capacity = memory.capacity or 1

    def add(name: str, size: int) -> None:
        share = size / capacity
        bar = "█" * min(round(share * _BAR_WIDTH), _BAR_WIDTH) or ("▏" if size else "")
        table.add_row(name, units.in_bytes(size), units.in_share(share), bar)

    sizes = {name: getattr(memory, name) for name in MEMORY_CLASSES}
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
    print_table(console, table)


def print_layer_sizes(console: rich.console.Console, tensors: Sequence[TensorRow]) -> None:
    """Prints the bytes of each layer's weights and moments on one device, largest first."""
    by_layer: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in tensors:
        by_layer[row.layer][row.kind] += row.bytes_per_device
    if not by_layer:
        return
    table = make_table("weights and moments of a layer", right=("weights", "moments", "per device"))
    rows = sorted(by_layer.items(), key=lambda item: -item[1].total())

    def add(name: str, sizes: Sequence[collections.Counter[str]]) -> None:
        parts = [sum(size[kind] for size in sizes) for kind in _KINDS]
        table.add_row(escape(name), *map(units.in_bytes, (*parts, sum(parts))))

    for layer, sizes in rows[:MAX_ROWS]:
        add(layer or "(no layer)", [sizes])
    rest = [sizes for _, sizes in rows[MAX_ROWS:]]
    if rest:
        add(f"and {len(rest)} more", rest)
    table.add_section()
    add("all", [sizes for _, sizes in rows])
    print_table(console, table)


def print_tensors(console: rich.console.Console, tensors: Sequence[TensorRow]) -> None:
    """Prints the largest weights and moments with their shardings."""
    if not tensors:
        say(console, "\nThe step keeps no weights or moments.")
        return
    table = make_table("tensor", "split", right=("bytes", "per device"))
    rows = sorted(tensors, key=lambda row: -row.bytes_per_device)
    for row in rows[:MAX_ROWS]:
        name = f"{row.path} ({row.kind})\n  {row.layout} {array_text(row.dtype, row.shape)}"
        table.add_row(
            escape(name),
            escape(row.split),
            units.in_bytes(row.bytes),
            units.in_bytes(row.bytes_per_device),
        )
    print_table(console, table)
    say_hidden(console, rows, lambda row: row.bytes_per_device, units.in_bytes)


def print_temporaries(console: rich.console.Console, rows: Sequence[TemporaryRow]) -> None:
    """Prints the largest temporaries."""
    if not rows:
        return
    table = make_table("largest temporaries", "layer", "shape", right=("bytes",))
    rows = sorted(rows, key=lambda row: -row.bytes)
    for row in rows[:MAX_ROWS]:
        cells = (row.name, row.layer, array_text(row.dtype, row.shape))
        table.add_row(*map(escape, cells), units.in_bytes(row.bytes))
    print_table(console, table)
    say_hidden(console, rows, lambda row: row.bytes, units.in_bytes)
