"""What gshard-inspect prints."""

from __future__ import annotations

from collections.abc import Sequence

import rich.box
import rich.console
import rich.table

from lingvo_gshard.sharding.listing import WeightRow
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.replication import Replicated
from lingvo_gshard.tools.inspection import inspection

_MOST_REMATERIALizED = 20


def print_split(
    console: rich.console.Console,
    name: str,
    partitioning: Partitioning,
    found: inspection.Split,
    with_moments: bool,
) -> None:
    """Prints how weights, and moments if asked for, are split, with the totals of both."""
    mesh = partitioning.mesh
    say(console, f"{name} on {mesh} ({mesh.size} devices), strategy {partitioning.strategy.name}:")
    for kind in partitioning.strategy.to_text().split(" | "):
        say(console, f"  {kind}")
    _print_rows(console, "weight", found.weights)
    whole = found.whole_weights
    if with_moments:
        _print_rows(console, "moment", found.moments)
        whole = whole + found.whole_moments
    for kind, rows in (("weights", found.weights), ("moments", found.moments)):
        _print_total(console, kind, rows, mesh.size)
    for axis in partitioning.unused_axes:
        say(
            console,
            f"Warning: nothing is split over axis {axis!r}: its {mesh.axis_size(axis)} devices do "
            "the same work and hold the same tensors.",
        )
    if whole:
        _print_whole(console, whole)


def print_compiled(console: rich.console.Console, compiled: inspection.Compiled) -> None:
    """Prints memory, collectives and what was made whole."""
    memory = {name: size_in_words(size) for name, size in compiled.memory.items()}
    say(console, f"\n{compiled.name}, compiled in {compiled.seconds:.1f} s")
    say(
        console,
        f"memory per device: {memory['peak']} = arguments {memory['arguments']} + outputs "
        f"{memory['outputs']} + temporaries {memory['temporaries']} + code {memory['code']}",
    )
    _print_collectives(console, compiled.collectives)
    found = compiled.rematerializations
    if not found:
        say(console, "No tensor was made whole to change its layout.")
    for row in found[:_MOST_REMATERIALizED]:
        say(
            console,
            f"Warning: {row.operation} is made whole on every device: from {row.before} to "
            f"{row.after}",
        )
    if len(found) > _MOST_REMATERIALizED:
        say(console, f"and {len(found) - _MOST_REMATERIALizED} more; --json has them all")


def size_in_words(size: int) -> str:
    """Returns bytes as `12 B`, `3.4 KiB`, `5.6 MiB`, ..."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:,.1f} TiB"


def print_pipelines(console: rich.console.Console, found: Sequence[dict]) -> None:
    """Prints how long each pipeline takes, and its bubbles."""
    for row in found:
        say(
            console,
            f"{row['layer']}: a pipeline of {row['stages']} stages, {row['micro_batches']} "
            f"micro-batches and {row['circulations']} circulations takes {row['ticks']} ticks, in "
            f"{row['idle_share']:.1%} of which a stage is idle",
        )


def say(console: rich.console.Console, text: str) -> None:
    """Prints a line as it stands."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(*left: str, right: Sequence[str] = ()) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in left:
        table.add_column(head)
    for head in right:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _print_rows(console: rich.console.Console, kind: str, rows: Sequence[WeightRow]) -> None:
    table = _table(kind, "layout", "shape", "type", "split", right=("bytes", "per device"))
    for row in rows:
        table.add_row(
            _plain(row.path),
            row.layout,
            ",".join(map(str, row.shape)),
            row.dtype,
            row.split + (f" ({row.note})" if row.note else ""),
            size_in_words(row.bytes),
            size_in_words(row.bytes_per_device),
        )
    console.print(table, highlight=False)


def _print_total(
    console: rich.console.Console, kind: str, rows: Sequence[WeightRow], devices: int
) -> None:
    size, held = sum(r.bytes for r in rows), sum(r.bytes_per_device for r in rows)
    share = f", {held / size:.1%} of it; an even split is {1 / devices:.1%}" if size else ""
    say(
        console,
        f"{kind}: {len(rows)} arrays, {size_in_words(size)}; each device holds "
        f"{size_in_words(held)}{share}",
    )


def _print_whole(console: rich.console.Console, whole: Sequence[Replicated]) -> None:
    table = _table("held whole", "shape", right=("bytes",))
    table.add_column("although the strategy splits a letter of it, because")
    for row in whole:
        table.add_row(
            _plain(row.path), ",".join(map(str, row.shape)), size_in_words(row.bytes), row.reason
        )
    console.print(table, highlight=False)


def _print_collectives(
    console: rich.console.Console, rows: Sequence[inspection.CollectiveRow]
) -> None:
    if not rows:
        say(console, "No collectives.")
        return
    table = _table("layer", "pass", "collective", right=("count", "bytes"))
    for row in rows:
        cells = _plain(row.layer), row.pass_, row.kind
        table.add_row(*cells, str(row.count), size_in_words(row.bytes))
    table.add_section()
    for kind, (count, size) in inspection.total_by_kind(rows).items():
        table.add_row("all", "", kind, str(count), size_in_words(size))
    console.print(table, highlight=False)


def _plain(text: str) -> str:
    """Text in which rich sees no markup: layers[0] is no style."""
    return text.replace("[", r"\[")
