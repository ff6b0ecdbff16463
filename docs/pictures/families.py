"""Draws how much families of languages share experts, from the JSON of gshard-experts report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from docs.pictures import heat_map
from docs.pictures.svg import MARGIN, Picture

_LEFT, _TOP = 230, 120
_LABEL = 190


def draw(experiment: str, layers: Sequence[Mapping]) -> str:
    """Returns a map for each layer: families by families, darker where they share more.

    Args:
      experiment: name of the run's experiment.
      layers: the layers of the report, with `path` and `family_overlap`.
    """
    names = sorted(layers[0]["family_overlap"]["families"])
    side = len(names) * heat_map.CELL
    height = _TOP + len(layers) * (side + _LABEL)
    words = ", ".join(
        f"{layer['path']}: {layer['family_overlap']['within']:.0%} within a family, "
        f"{layer['family_overlap']['between']:.0%} between families"
        for layer in layers
    )
    picture = Picture(
        _LEFT + side + MARGIN + 60,
        height,
        f"Which families of languages share experts in {experiment}",
        f"For each layer with experts, a map of families by families: the share of their choices "
        f"that two languages have in common. {words}.",
    )
    picture.text(
        MARGIN, 66, "The share of their choices that two languages have in common, in %.", "muted"
    )
    for index, layer in enumerate(layers):
        _draw_layer(picture, layer, names, _TOP + index * (side + _LABEL))
    return picture.to_text()


def _draw_layer(picture: Picture, layer: Mapping, names: Sequence[str], top: float) -> None:
    overlap = layer["family_overlap"]
    picture.text(
        MARGIN,
        top - 14,
        f"{layer['path']}, {layer['num_experts']} experts: {overlap['within']:.0%} within a "
        f"family, {overlap['between']:.0%} between families",
        "head",
    )
    rows = {name: overlap["families"][name] for name in names}
    heat_map.draw(picture, _LEFT, top, rows, names)
    for column, name in enumerate(names):
        x, y = _LEFT + column * heat_map.CELL + 18, top + len(names) * heat_map.CELL + 8
        picture.text(x, y, name, "small end", transform=f"rotate(-50 {x} {y})")
