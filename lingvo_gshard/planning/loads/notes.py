"""Notes of a plan with loads: what its numbers leave out."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.planning.loads.file import Loads
from lingvo_gshard.planning.loads.rows import LayerRows

_MOST_NAMED = 3


def notes(loads: Loads, layers: Sequence[LayerRows], replicas: int) -> list[str]:
    """Returns the notes.

    Args:
      loads: the loads.
      layers: the rows of all layers.
      replicas: further copies of experts.
    """
    found = []
    if loads.is_measured:
        found.append(
            f"loads: {loads.path} has no watched steps (trainer.routers.every_steps), so that the "
            "loads are those of its test rows: one load for all quantiles, dropped tokens as there"
        )
    fixed = [rows for rows in layers if not rows.layer.is_dropless]
    if fixed:
        found.append(
            f"loads: all capacity slots of {_paths(fixed)} are computed, full or empty: loads "
            "decide what is dropped, and neither they nor a placement change the time"
        )
    others = [rows for rows in layers if not (loads.is_measured or rows.has_same_groups)]
    if others:
        record, layer = others[0].records[0], others[0].layer
        found.append(
            f"loads: {_paths(others)} have other groups than in the file ({record.groups:,} of "
            f"{record.group_size:,} tokens there, {layer.groups * layer.micro_batches:,} of "
            f"{layer.group_size:,} here): loads are scaled, and capacities that suffice are a guess"
        )
    unknown = [rows for rows in layers if rows.layer.is_dropless and rows.sent is None]
    if unknown:
        found.append(
            f"loads: {_paths(unknown)}: the file does not tell which of the planned devices sends "
            "which rows, so that sufficient bounds are unknown"
        )
    if any(rows.layer.micro_batches > 1 for rows in layers):
        found.append(
            "loads: loads are means over the micro-batches of a step; single ones are less even"
        )
    if replicas:
        found.append("loads: a run has one copy of each expert; replicas are planned only")
    return found


def _paths(layers: Sequence[LayerRows]) -> str:
    paths = [rows.layer.path for rows in layers]
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return ", ".join(paths[:_MOST_NAMED]) + more
