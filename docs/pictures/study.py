"""Draws what a study of experts found, from the JSON of python -m studies experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from operator import itemgetter

from docs.pictures.curve import round_step
from docs.pictures.svg import MARGIN, Picture

# The groups of languages, their colors and names.
_GROUPS = (
    ("most text", 0, "languages with most text"),
    ("middle", 1, "the middle third"),
    ("least text", 2, "languages with least text"),
)
_MOST_TICKS = 5
_WIDTH = 880
_LEFT, _RIGHT = 90, 840
# Where the longest bar ends.
_BARS_RIGHT = 700
_TOP = 130
_HEIGHT, _BETWEEN = 190, 70
# What a bar of the gains takes.
_BAR, _ROW = 22, 46


@dataclasses.dataclass(frozen=True)
class Panel:
    """One score against the models.

    Attributes:
      field: name in the JSON.
      heading: what is drawn, with its unit.
      tick: how a value is written at the axis.
    """

    field: str
    heading: str
    tick: str


_PANELS = (
    Panel("perplexity", "test perplexity, relative to the dense model", "{:+.0%}"),
    Panel("chrf", "chrF, points more than the dense model", "{:+.1f}"),
)


def draw(runs: Sequence[dict]) -> str:
    """Returns the change of perplexity and of chrF by model, a line for each third of languages.

    Args:
      runs: the runs of a study. The first model is what the others are compared with.
    """
    runs = [run for run in runs if not run["language"]]
    models = list(dict.fromkeys(run["model"] for run in runs))
    picture = Picture(
        _WIDTH,
        _TOP + len(_PANELS) * (_HEIGHT + _BETWEEN) + 10,
        "What experts are worth at equal FLOPs per token",
        "Test perplexity and chrF of models with more and more experts, relative to the dense "
        "model, for the third of the languages with most text, the middle one and the one with "
        "least text. " + _in_words(runs, models),
    )
    note = "A point is the mean of a model's seeds, a bar their range."
    picture.text(MARGIN, 66, f"{runs[0]['step']:,} steps. {note}", "muted")
    for index, (_, color, name) in enumerate(_GROUPS):
        picture.rect(MARGIN + 200 * index, 82, 12, 12, f"c{color}")
        picture.text(MARGIN + 200 * index + 20, 93, name, "small")
    for index, panel in enumerate(_PANELS):
        _draw_panel(picture, runs, models, panel, _TOP + index * (_HEIGHT + _BETWEEN) + 20)
    return picture.to_text()


def changes(runs: Sequence[dict], model: str, group: str, field: str) -> list[float]:
    """Returns how much the runs of a model differ from the mean of those of the first model.

    Args:
      runs: the runs of a study.
      model: the model.
      group: a group of languages.
      field: "perplexity", whose change is relative, or "chrf", whose change is in points.
    """
    first = runs[0]["model"]
    base = [run["thirds"][group][field] for run in runs if run["model"] == first]
    mean = sum(base) / len(base)
    values = [run["thirds"][group][field] for run in runs if run["model"] == model]
    return [value / mean - 1 if field == "perplexity" else value - mean for value in values]


def round_ticks(low: float, high: float) -> list[float]:
    """Returns consecutive multiples of a round number that enclose a range."""
    step = round_step(max(high - low, 1e-6), _MOST_TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def draw_gains(runs: Sequence[dict]) -> str:
    """Returns two bars for each language: chrF when trained alone, and with all languages.

    Args:
      runs: the runs of a study, with bilingual ones. The second bar is of the model with the most
        parameters.
    """
    own = [run for run in runs if run["language"]]
    largest = max((run for run in runs if not run["language"]), key=itemgetter("parameters"))
    shared = [run for run in runs if run["model"] == largest["model"]]
    picture = Picture(
        _WIDTH,
        _TOP + len(own) * _ROW + 30,
        "What a language gains from the text of the others",
        f"chrF of bilingual models and of {largest['model']}, which is trained on all languages: "
        + "; ".join(
            f"{run['language']} {run['languages'][run['language']]['chrf']:.1f} and "
            f"{_mean(shared, run['language']):.1f}"
            for run in own
        )
        + ".",
    )
    picture.text(MARGIN, 66, "chrF of the test rows, with as many FLOPs per token", "muted")
    for color, name in enumerate(("trained on this language alone", "trained on all languages")):
        picture.rect(MARGIN + 230 * color, 82, 12, 12, f"c{color}")
        picture.text(MARGIN + 230 * color + 20, 93, name, "small")
    scores = [(run["languages"][run["language"]], _mean(shared, run["language"])) for run in own]
    longest = max(max(mine["chrf"], mean) for mine, mean in scores)
    for index, (run, (mine, mean)) in enumerate(zip(own, scores, strict=True)):
        top = _TOP + index * _ROW
        picture.text(_LEFT - 12, top + _BAR, run["language"], "head end")
        for place, value in enumerate((mine["chrf"], mean)):
            width = value / longest * (_BARS_RIGHT - _LEFT)
            y = top + place * (_BAR - 4)
            picture.rect(_LEFT, y, width, _BAR - 6, f"c{place}")
            picture.text(_LEFT + width + 8, y + 13, f"{value:.1f}", "small")
        picture.text(_BARS_RIGHT + 60, top + _BAR, f"{mine['rows']:,} test rows", "small muted")
    return picture.to_text()


def _mean(runs: Sequence[dict], language: str) -> float:
    return sum(run["languages"][language]["chrf"] for run in runs) / len(runs)


def _in_words(runs: Sequence[dict], models: Sequence[str]) -> str:
    parts = []
    for model in models[1:]:
        found = changes(runs, model, "all", "perplexity")
        parts.append(f"{model}: perplexity {sum(found) / len(found):+.1%}")
    return "; ".join(parts) + " over all languages."


def _draw_panel(
    picture: Picture, runs: Sequence[dict], models: Sequence[str], panel: Panel, top: float
) -> None:
    found = {
        (model, group): changes(runs, model, group, panel.field)
        for model in models
        for group, _, _ in _GROUPS
    }
    every = [value for values in found.values() for value in values]
    ticks = round_ticks(min(0, *every), max(0, *every))
    high, span = ticks[-1], ticks[-1] - ticks[0]

    def place(index: float, value: float) -> tuple[float, float]:
        x = _LEFT + (index + 0.5) / len(models) * (_RIGHT - _LEFT)
        return x, top + _HEIGHT * (high - value) / span

    picture.text(_LEFT, top - 12, panel.heading, "head")
    for value in ticks:
        _, y = place(0, value)
        picture.line([(_LEFT, y), (_RIGHT, y)], "rule")
        picture.text(_LEFT - 10, y + 4, panel.tick.format(value), "small muted end")
    picture.line([(_LEFT, place(0, 0)[1]), (_RIGHT, place(0, 0)[1])], "thin")
    for number, (group, color, _) in enumerate(_GROUPS):
        means = []
        for index, model in enumerate(models):
            values = found[model, group]
            shifted = index + (number - 1) * 0.03
            means.append(place(shifted, sum(values) / len(values)))
            picture.line(
                [place(shifted, min(values)), place(shifted, max(values))],
                f"s{color}",
                stroke_width="5",
                stroke_opacity="0.4",
            )
            picture.rect(means[-1][0] - 4, means[-1][1] - 4, 8, 8, f"c{color}", 4)
        picture.line(means, f"s{color}", stroke_width="2", stroke_linejoin="round")
    for index, model in enumerate(models):
        x, _ = place(index, 0)
        parameters = next(run["parameters"] for run in runs if run["model"] == model) / 1e6
        picture.text(x, top + _HEIGHT + 22, f"{model}, {parameters:.1f}M", "small muted middle")
