"""Draws what routers did while runs trained, from their routers.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from docs.pictures import heat_map
from docs.pictures.curve import ticks
from docs.pictures.svg import MARGIN, Picture
from lingvo_gshard.wings.services.routers.router_records import RouterRecord

# Shares of classes of tokens are sums over so many watched steps, the last ones.
STEPS_OF_A_MAP = 10

_LEFT, _TOP, _BETWEEN = 150, 120, 80
# A panel of the curves.
_WIDTH, _HEIGHT, _COLUMN = 330, 120, 430
_CURVE_LEFT = 70


def class_shares(records: Sequence[RouterRecord]) -> dict[str, np.ndarray]:
    """Returns each class's share of choices that go to each expert, [E], over a layer's records."""
    names = dict.fromkeys(name for record in records for name in record.by_class)
    counts = {
        name: np.sum([r.by_class[name] for r in records if name in r.by_class], 0) for name in names
    }
    counts["all tokens"] = np.sum([record.choices for record in records], 0)
    return {name: count / count.sum() for name, count in counts.items() if count.sum()}


def draw_classes(name: str, records: Sequence[RouterRecord]) -> str:
    """Returns a map for each layer: classes of tokens by experts.

    Args:
      name: the run.
      records: its records, in the order of steps.
    """
    layers = _by_layer(records)
    maps = {path: class_shares(found[-STEPS_OF_A_MAP:]) for path, found in layers.items()}
    experts = records[0].num_experts
    heights = [len(rows) * heat_map.CELL + _BETWEEN for rows in maps.values()]
    words = "; ".join(f"{path}: {_favorites(rows)}" for path, rows in maps.items())
    picture = Picture(
        _LEFT + experts * heat_map.CELL + 330,
        _TOP + sum(heights) - 50,
        f"Which experts of {name} get which kind of token",
        f"For each layer with experts, a map of classes of tokens by experts. {words}.",
    )
    last = records[-1].step
    picture.text(
        MARGIN,
        66,
        f"The share of a class's choices, in %, over {STEPS_OF_A_MAP} batches up to step {last:,}",
        "muted",
    )
    top = _TOP
    for (path, rows), height in zip(maps.items(), heights, strict=True):
        picture.text(MARGIN, top - 28, path, "head")
        columns = [str(expert) for expert in range(experts)]
        for expert, label in enumerate(columns):
            picture.text(_LEFT + expert * heat_map.CELL + 14, top - 8, label, "small muted middle")
        shares = {
            kind: dict(zip(columns, map(float, share), strict=True)) for kind, share in rows.items()
        }
        heat_map.draw(picture, _LEFT, top, shares, columns)
        top += height
    return picture.to_text()


def draw_changes(runs: Mapping[str, Sequence[RouterRecord]]) -> str:
    """Returns curves of the busiest expert's load: a row for each run, a panel for each layer.

    Args:
      runs: name of a run -> its records. Each is drawn above the first one, which the others
        change.
    """
    first, *others = runs
    layers = list(_by_layer(runs[first]))
    picture = Picture(
        _CURVE_LEFT + len(layers) * _COLUMN,
        _TOP + len(others) * (_HEIGHT + _BETWEEN) - 10,
        "What routers do with another loss, noise or size of groups",
        f"The load of the busiest expert over the mean load, by step, of {', '.join(others)}, each "
        f"with that of {first}. " + " ".join(f"{name}: {_end(runs[name])}." for name in runs),
    )
    picture.text(
        MARGIN,
        66,
        f"Load of the busiest expert over the mean load, by step; gray: {first}",
        "muted",
    )
    for row, name in enumerate(others):
        top = _TOP + row * (_HEIGHT + _BETWEEN) + 10
        highest = max(_busiest(record) for run in (first, name) for record in runs[run])
        picture.text(MARGIN, top - 28, f"{name}: {_end(runs[name])}", "head")
        for column, layer in enumerate(layers):
            left = _CURVE_LEFT + column * _COLUMN
            picture.text(left + 8, top - 8, layer, "small muted")
            _draw_axes(picture, left, top, highest, runs[name][-1].step)
            for style, run in (("rule", first), ("s0", name)):
                found = _by_layer(runs[run])[layer]
                last = found[-1].step
                points = [
                    (
                        left + record.step / last * _WIDTH,
                        top + _HEIGHT * (1 - _busiest(record) / highest),
                    )
                    for record in found
                ]
                picture.line(points, style, stroke_width="2", stroke_linejoin="round")
    return picture.to_text()


def _draw_axes(picture: Picture, left: float, top: float, highest: float, last: int) -> None:
    for value in ticks(highest, 4):
        y = top + _HEIGHT * (1 - value / highest)
        picture.line([(left, y), (left + _WIDTH, y)], "rule", stroke_width="0.5")
        picture.text(left - 8, y + 4, f"{value:g}", "small muted end")
    for step in ticks(last, 4):
        x = left + step / last * _WIDTH
        picture.text(x, top + _HEIGHT + 18, f"{step:,.0f}", "small muted middle")


def _by_layer(records: Sequence[RouterRecord]) -> dict[str, list[RouterRecord]]:
    layers: dict[str, list[RouterRecord]] = {}
    for record in records:
        layers.setdefault(record.layer, []).append(record)
    return layers


def _busiest(record: RouterRecord) -> float:
    return record.busiest[1] * record.num_experts


def _favorites(rows: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{kind} {share.argmax()} ({share.max():.0%})" for kind, share in rows.items())


def _end(records: Sequence[RouterRecord]) -> str:
    """Returns means of the last watched steps, over layers, in words."""
    last = records[-STEPS_OF_A_MAP * len(_by_layer(records)) :]
    load = np.mean([_busiest(record) for record in last])
    dropped = np.mean([record.dropped_share for record in last])
    text = f"busiest {load:.2f} times the mean, {dropped:.1%} dropped"
    entropies = [record.token_entropy for record in last if record.token_entropy is not None]
    return f"{text}, entropy {np.mean(entropies):.2f} nats" if entropies else text
