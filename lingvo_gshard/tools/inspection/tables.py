"""Prints what gshard-inspect has collected."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from lingvo_gshard.core import kernel_use
from lingvo_gshard.sharding import HARDWARE, Partitioning, WeightRow
from lingvo_gshard.tools.console import Console, in_bytes, make_table
from lingvo_gshard.tools.inspection import inspection

# More tensors than this are only in the JSON.
_MOST_REPLICATIONS = 20
# More parts of a weight, or devices of a part, than these are only in the JSON.
_MOST_PARTS, _MOST_DEVICES = 64, 16


def print_sharding(
    console: Console,
    experiment: str,
    partitioning: Partitioning,
    sharding: inspection.StateSharding,
    with_moments: bool,
) -> None:
    """Prints how each weight is split, with totals, warnings, and on request the moments."""
    mesh, strategy = partitioning.mesh, partitioning.strategy
    console.say(f"{experiment} on {mesh} ({mesh.size} devices), strategy {strategy.name}:")
    for table in strategy.to_text().split(" | "):
        console.say(f"  {table}")
    _print_rows(console, "weight", sharding.weights)
    replicated = sharding.replicated_weights
    if with_moments:
        _print_rows(console, "moment", sharding.moments)
        replicated = replicated + sharding.replicated_moments
    for kind, rows in (("weights", sharding.weights), ("moments", sharding.moments)):
        size, held = sum(r.bytes for r in rows), sum(r.bytes_per_device for r in rows)
        share = f", {held / size:.1%} of it; an even split is {1 / mesh.size:.1%}" if size else ""
        found = f"{kind}: {len(rows)} arrays, {in_bytes(size)}; each device holds {in_bytes(held)}"
        console.say(found + share)
    for axis in partitioning.unused_axes:
        console.say(
            f"Warning: nothing is split over axis {axis!r}: its {mesh.axis_size(axis)} devices do "
            "the same work and hold the same tensors."
        )
    if replicated:
        table = make_table("replicated", "shape", right=("bytes",))
        table.add_column("although the strategy splits one of its dimensions, because")
        for row in replicated:
            shape = ",".join(map(str, row.shape))
            table.add_row(escape(row.path), shape, in_bytes(row.bytes), row.reason)
        console.print_table(table)


def print_compiled(console: Console, compiled: inspection.CompiledFunction) -> None:
    """Prints the memory, the collectives and the full replications of a compiled function."""
    memory = {name: in_bytes(size) for name, size in compiled.memory_per_device.items()}
    console.say(f"\n{compiled.function}, compiled in {compiled.compile_seconds:.1f} s")
    console.say(
        f"memory per device: {memory['peak']} = arguments {memory['arguments']} + outputs "
        f"{memory['outputs']} + temporaries {memory['temporaries']} + code {memory['code']}"
    )
    _print_collectives(console, compiled.collectives)
    replications = compiled.full_replications
    if not replications:
        console.say("No tensor is replicated in full to reshard it.")
    for replication in replications[:_MOST_REPLICATIONS]:
        console.say(f"Warning: {replication}")
    console.say_hidden(replications[_MOST_REPLICATIONS:])


def print_pipelines(console: Console, pipelines: Sequence[dict]) -> None:
    """Prints how long each pipeline takes, and the share of idle time."""
    for row in pipelines:
        console.say(
            f"{row['layer']}: a pipeline of {row['stages']} stages, {row['micro_batches']} "
            f"micro-batches and {row['circulations']} circulations takes {row['ticks']} ticks. "
            f"Its stages are idle {row['idle_share']:.1%} of the time."
        )


def print_kernels(
    console: Console, function: str, platform: str, uses: Sequence[kernel_use.KernelUse]
) -> None:
    """Prints which layers use kernels of a platform, and why others use none."""
    console.say(f"\nkernels of {function} on {platform}:")
    nothing = "no layer could use a kernel"
    if platform not in HARDWARE:
        nothing = f"{platform} has no kernels; those of {' and '.join(HARDWARE)} are known"
    for line in kernel_use.uses_in_words(uses) or [nothing]:
        console.say(f"  {line}")


def print_placements(console: Console, found: Sequence[dict]) -> None:
    """Prints the parts of each weight, and the devices that hold them."""
    for weight in found:
        sizes = " ".join(
            f"{letter}{size}"
            for letter, size in zip(weight["layout"], weight["shape"], strict=True)
        )
        console.say(f"\n{weight['path']} [{sizes}]")
        rows = [
            [f"{first:,} to {end - 1:,}" for first, end in part["ranges"]]
            + [_devices(part["devices"])]
            for part in weight["parts"]
        ]
        console.print_rows((*weight["layout"], "devices"), (), rows[:_MOST_PARTS])
        console.say_hidden(rows[_MOST_PARTS:])


def _devices(numbers: Sequence[int]) -> str:
    """Returns numbers of devices as text, such as "0 to 3" or "0, 2, 4 and 5 more"."""
    if len(numbers) > 1 and len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"{numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:_MOST_DEVICES]))
    left = len(numbers) - _MOST_DEVICES
    return f"{shown} and {left:,} more" if left > 0 else shown


def _print_rows(console: Console, kind: str, rows: Sequence[WeightRow]) -> None:
    cells = [
        (
            escape(row.path),
            row.layout,
            ",".join(map(str, row.shape)),
            row.dtype,
            row.split + (f" ({row.note})" if row.note else ""),
            in_bytes(row.bytes),
            in_bytes(row.bytes_per_device),
        )
        for row in rows
    ]
    left = (kind, "layout", "shape", "type", "split")
    console.print_rows(left, ("bytes", "per device"), cells)


def _print_collectives(console: Console, rows: Sequence[inspection.CollectiveTotal]) -> None:
    if not rows:
        console.say("No collectives.")
        return
    cells = [_cells(row, row.layer) for row in rows]
    totals = [_cells(row, "all") for row in inspection.total_by_kind(rows)]
    right = ("in program", "per step", "bytes per step")
    console.print_rows(("layer", "phase", "collective"), right, cells, below=totals)


def _cells(row: inspection.CollectiveTotal, layer: str) -> tuple[str, ...]:
    return (
        escape(layer),
        row.phase,
        row.kind,
        f"{row.count_in_program:,}",
        f"{row.count_per_step:,}",
        in_bytes(row.bytes_per_step),
    )
