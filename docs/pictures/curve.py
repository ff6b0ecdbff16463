"""Draws the curves of a run: loss, accuracy and learning rate, from its metrics.jsonl."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from docs.pictures.svg import MARGIN, Picture

# Each point of a curve is the mean of this many steps.
STEPS_OF_A_POINT = 20

_WIDTH = 880
_LEFT, _RIGHT = 84, 720
_TOP = 96
_BETWEEN = 42


@dataclasses.dataclass(frozen=True)
class Panel:
    """One metric over the steps.

    Attributes:
      metric: name in metrics.jsonl.
      heading: the name in words, with the unit.
      height: in pixels.
      color: index of a color of the picture.
      tick: how a value is written at the axis.
      last: how the last value is written beside the curve; None leaves it out.
    """

    metric: str
    heading: str
    height: int
    color: int
    tick: str
    last: str | None = None


_PANELS = (
    Panel("cross_entropy", "cross-entropy, nats a token", 170, 0, "{:g}", "{:.2f}"),
    Panel("accuracy", "accuracy of the next token", 92, 2, "{:.0%}", "{:.0%}"),
    Panel("learning_rate", "learning rate", 60, 1, "{:g}"),
)
# A tick of an axis takes at least this many pixels.
_LEAST_TICK = 22


def points(rows: Sequence[dict], metric: str) -> list[tuple[float, float]]:
    """Returns (step, mean) of each STEPS_OF_A_POINT steps; the step is the middle one."""
    found = [(row["step"], row[metric]) for row in rows if metric in row]
    parts = [found[i : i + STEPS_OF_A_POINT] for i in range(0, len(found), STEPS_OF_A_POINT)]
    return [
        (sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part))
        for part in parts
    ]


def round_step(span: float, most: int) -> float:
    """Returns the smallest round number of which `most` multiples cover a span."""
    unit = 10 ** math.floor(math.log10(span))
    return next(s * unit for s in (0.2, 0.25, 0.5, 1, 2, 5, 10) if span / (s * unit) <= most + 0.01)


def ticks(highest: float, most: int) -> list[float]:
    """Returns 0 and the multiples of a round number up to `highest`, at most `most` of them."""
    step = round_step(highest, most)
    return [step * index for index in range(int(highest / step + 0.01) + 1)]


def draw(name: str, rows: Sequence[dict]) -> str:
    """Returns the curves of a run as SVG.

    Args:
      name: the run's experiment.
      rows: the metrics of each step, at least one.
    """
    height = _TOP + sum(panel.height + _BETWEEN for panel in _PANELS) + 30
    last = rows[-1]
    tokens = sum(row["tokens"] for row in rows) / 1e6
    picture = Picture(
        _WIDTH,
        height,
        f"The training of {name}",
        f"Cross-entropy falls from {points(rows, 'cross_entropy')[0][1]:.2f} to "
        f"{points(rows, 'cross_entropy')[-1][1]:.2f} over {last['step']} steps, token accuracy "
        f"rises to {points(rows, 'accuracy')[-1][1]:.0%}; the learning rate warms up and then "
        "falls to zero.",
    )
    picture.text(
        MARGIN,
        66,
        f"{last['step']:,} steps, {tokens:.1f} million tokens. A point is the mean of "
        f"{STEPS_OF_A_POINT} steps; the dot is the dev set.",
        "muted",
    )
    top = _TOP
    for panel in _PANELS:
        _draw_panel(picture, rows, panel, top + 20)
        top += panel.height + _BETWEEN
    for step in ticks(last["step"], 8):
        x = _across(step, last["step"])
        picture.text(x, top - _BETWEEN + 38, f"{step:,.0f}", "small muted middle")
    picture.text(_RIGHT + 20, top - _BETWEEN + 38, "step", "small muted")
    return picture.to_text()


def _across(step: float, last: float) -> float:
    return _LEFT + step / last * (_RIGHT - _LEFT)


def _draw_panel(picture: Picture, rows: Sequence[dict], panel: Panel, top: float) -> None:
    curve = points(rows, panel.metric)
    highest = max(row[panel.metric] for row in rows if panel.metric in row)
    last_step = rows[-1]["step"]

    def place(step: float, value: float) -> tuple[float, float]:
        return _across(step, last_step), top + panel.height * (1 - value / highest)

    picture.text(_LEFT, top - 9, panel.heading, "head")
    for value in ticks(highest, panel.height // _LEAST_TICK):
        (_, y) = place(0, value)
        picture.line([(_LEFT, y), (_RIGHT, y)], "rule")
        picture.text(_LEFT - 10, y + 4, panel.tick.format(value), "small muted end")
    line = [place(*point) for point in curve]
    picture.line(line, f"s{panel.color}", stroke_width="2", stroke_linejoin="round")
    if panel.last is None:
        return
    (_, end) = place(*curve[-1])
    picture.text(_RIGHT + 12, end + 4, f"training {panel.last.format(curve[-1][1])}", "small")
    name = f"dev/{panel.metric}"
    dev = [(row["step"], row[name]) for row in rows if name in row]
    for point in dev:
        x, y = place(*point)
        picture.rect(x - 4, y - 4, 8, 8, f"c{panel.color}", 4)
    if dev:
        (_, y) = place(*dev[-1])
        # The two labels must not overlap.
        y = min(y, end - 16) if y < end else max(y, end + 16)
        picture.text(_RIGHT + 12, y + 4, f"dev {panel.last.format(dev[-1][1])}", "small")
