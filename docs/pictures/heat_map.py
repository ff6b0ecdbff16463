"""Draws a table of shares as a map: a number in each cell, darker where it is larger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from docs.pictures.svg import Picture

CELL = 30
_GAP = 2


def draw(
    picture: Picture,
    left: float,
    top: float,
    rows: Mapping[str, Mapping[str, float]],
    columns: Sequence[str],
) -> None:
    """Draws shares in percent, with the names of the rows at their left.

    Args:
      picture: what is drawn on.
      left: x of the first column, in pixels.
      top: y of the first row.
      rows: row -> column -> share from 0 to 1. A cell that is not there is left empty.
      columns: the columns in their order.
    """
    values = [value for row in rows.values() for value in row.values()]
    low, high = min(values), max(values)
    for index, (name, row) in enumerate(rows.items()):
        y = top + index * CELL
        picture.text(left - 10, y + 19, name, "small end")
        for column, other in enumerate(columns):
            if other not in row:
                continue
            shade = 0.08 + 0.92 * (row[other] - low) / max(high - low, 1e-9)
            x = left + column * CELL
            picture.rect(x, y, CELL - _GAP, CELL - _GAP, "c0", 2, fill_opacity=f"{shade:.2f}")
            picture.text(x + 14, y + 19, f"{row[other] * 100:.0f}", "small middle")
