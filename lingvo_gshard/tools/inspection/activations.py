"""gshard-inspect --activations: a step's activations with their shardings, and what moves data."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from lingvo_gshard.core import UserError, names
from lingvo_gshard.runtime import partitioning_log
from lingvo_gshard.sharding import Mesh, matches_path
from lingvo_gshard.tools.console import Console, array_text, in_bytes, make_table
from lingvo_gshard.tools.inspection import inspection
from lingvo_gshard.wings.propagation.activations import Activation
from lingvo_gshard.wings.propagation.propagated import Resharding

TASK = "task"
_UNKNOWN = "an unknown line"
# Activations below this share of the largest one, and more movements than these, are only in the
# JSON.
_LEAST_SHARE, _MOST_MOVEMENTS, _MOST_WARNINGS = 0.01, 20, 20


def check(pattern: str, mesh: Mesh, paths: Sequence[str]) -> None:
    """Raises UserError if no layer matches --activations, or the mesh has one device."""
    if not any(_matches(pattern, path) for path in paths):
        hint = names.nearest(pattern.removeprefix(f"{TASK}."), [path for path in paths if path])
        raise UserError(f"--activations: no layer is named {pattern!r}. {hint}")
    if mesh.size == 1:
        raise UserError(
            f"--activations: nothing is split on --mesh={mesh}; expected a mesh of several "
            "devices, such as data=4,model=2"
        )


def select(rows: Sequence[Activation] | None, pattern: str) -> list[Activation]:
    """Returns the activations of matching layers. Raises UserError if none are reported."""
    if rows is None:
        raise UserError(
            "--activations: the compiler for these devices does not say how it splits tensors. "
            "JAX_PLATFORMS=cpu in the environment takes virtual devices"
        )
    return [row for row in rows if _matches(pattern, row.layer)]


def _matches(pattern: str, layer: str) -> bool:
    # A stack `encoder.layers` contains `encoder.layers[0]`.
    return matches_path(pattern, layer) or matches_path(f"{pattern}[*]", layer)


def print_activations(console: Console, rows: Sequence[Activation]) -> None:
    """Prints activations by layer, and warns of large ones that every device holds in full."""
    largest = max((row.bytes for row in rows), default=0)
    shown = [row for row in rows if row.bytes >= _LEAST_SHARE * largest]
    left = ("layer", "computed by", "layout", "shape", "sharding", "by")
    table = make_table(*left, right=("per device",))
    table.add_column("at", no_wrap=True)
    before = None
    for row in shown:
        if before not in (None, row.layer):
            table.add_section()
        table.add_row(
            escape("" if row.layer == before else row.layer or TASK),
            ", ".join(row.operations),
            row.layout,
            array_text(row.dtype, row.shape),
            row.chosen,
            _chosen_by(row),
            in_bytes(row.bytes_per_device),
            row.source or _UNKNOWN,
        )
        before = row.layer
    console.print_table(table)
    annotated = sum(bool(row.asked) for row in rows)
    console.say(
        f"{len(rows)} activations of the forward pass: {annotated} are annotated, XLA chose the "
        f"sharding of {len(rows) - annotated}"
    )
    if len(rows) > len(shown):
        console.say(
            f"{len(rows) - len(shown)} have less than {_LEAST_SHARE:.0%} of the bytes of the "
            "largest; --json lists them all"
        )
    _warn_of_whole(console, rows)


def whole_in_words(row: Activation) -> str:
    """Returns a warning of an activation that every device holds in full."""
    reason = "no annotation says how to split it"
    if row.asked:
        letters = f" {row.layout}" if row.layout else ""
        reason = f"its annotation{letters} splits no dimension"
    computed = f" ({', '.join(row.operations)})" if row.operations else ""
    array = array_text(row.dtype, row.shape)
    return (
        f"{row.layer or TASK}: {array}, {in_bytes(row.bytes)}, is whole on every device: {reason}, "
        f"at {row.source or _UNKNOWN}{computed}"
    )


def cause_in_words(row: Resharding) -> str:
    """Returns why a tensor moves between devices: the line, and on another one both shardings."""
    by = f"{row.operation or 'an operation'} at {row.source or _UNKNOWN}"
    if row.annotated_at:
        asks = f"annotation {row.layout}".rstrip() + f" at {row.annotated_at}"
        by = f"{asks} of {by}" if row.source else asks
    return f"{by}\n  from {row.before} to {row.after}" if row.after else by


def print_reshardings(console: Console, rows: Sequence[Resharding]) -> None:
    """Prints the collectives that only move data, each with its cause."""
    if not rows:
        return
    table = make_table("what only moves data", right=("bytes per step",))
    table.add_column("because of")
    for row in rows[:_MOST_MOVEMENTS]:
        layer = row.layer or inspection.NO_SINGLE_LAYER
        table.add_row(
            escape(f"{row.kind} over {', '.join(row.axes) or 'all'}\n  {layer}, {row.phase}"),
            in_bytes(row.bytes_per_step),
            escape(cause_in_words(row)),
        )
    console.print_table(table)
    console.say_hidden(rows[_MOST_MOVEMENTS:])


def _warn_of_whole(console: Console, rows: Sequence[Activation]) -> None:
    large = [row for row in rows if row.parts == 1 and row.bytes >= partitioning_log.LEAST_BYTES]
    whole = sorted(large, key=lambda row: -row.bytes)
    for row in whole[:_MOST_WARNINGS]:
        console.say(f"Warning: {whole_in_words(row)}")
    console.say_hidden(whole[_MOST_WARNINGS:])


def _chosen_by(row: Activation) -> str:
    if not row.asked:
        return "XLA"
    return "annotation" if row.chosen == row.asked else f"XLA, for {row.asked}"
