"""Draws what a study of language models found, from the JSON of python -m studies texts."""

from __future__ import annotations

from collections.abc import Sequence

from docs.pictures.svg import MARGIN, Picture

_WIDTH = 880
_LEFT, _RIGHT = 150, 720
_TOP = 130
_BAR, _GAP = 16, 18
ALL = "all"


def change(runs: Sequence[dict], model: str, kind: str) -> float:
    """Returns the change of the mean perplexity against the first model's, such as -0.2.

    Args:
      runs: the runs of a study. The first model is what the others are compared with.
      model: the model.
      kind: a kind of text.
    """
    base, own = (
        [run["perplexity"][kind] for run in runs if run["model"] == name]
        for name in (runs[0]["model"], model)
    )
    return sum(own) / len(own) / (sum(base) / len(base)) - 1


def draw(runs: Sequence[dict]) -> str:
    """Returns a bar for each kind of text and model: how much lower its perplexity is.

    Args:
      runs: the runs of a study. The first model is what the others are compared with.
    """
    models = list(dict.fromkeys(run["model"] for run in runs))[1:]
    tokens = runs[0]["tokens"]
    kinds = sorted(tokens, key=lambda kind: (kind != ALL, -tokens[kind]))
    found = {(kind, model): change(runs, model, kind) for kind in kinds for model in models}
    row = len(models) * _BAR + _GAP
    words = "; ".join(f"{model} {found[ALL, model]:+.1%}" for model in models)
    picture = Picture(
        _WIDTH,
        _TOP + len(kinds) * row + 20,
        "What experts are worth in a language model at equal FLOPs per token",
        f"Test perplexity of models with more and more experts, relative to the dense model, by "
        f"kind of text. Over all texts: {words}.",
    )
    note = "test perplexity, relative to the dense model"
    picture.text(MARGIN, 66, f"{runs[0]['step']:,} steps; {note}", "muted")
    for index, model in enumerate(models):
        picture.rect(MARGIN + 200 * index, 82, 12, 12, f"c{index}")
        size = next(run["parameters"] for run in runs if run["model"] == model) / 1e6
        picture.text(MARGIN + 200 * index + 20, 93, f"{model}, {size:.1f}M", "small")
    longest = max(*map(abs, found.values()), 1e-6)
    for place, kind in enumerate(kinds):
        top = _TOP + place * row
        picture.text(_LEFT - 12, top + row / 2, kind, "head end")
        picture.text(_RIGHT + 60, top + row / 2, f"{tokens[kind]:,} tokens", "small muted")
        for index, model in enumerate(models):
            value, y = found[kind, model], top + index * _BAR
            width = abs(value) / longest * (_RIGHT - _LEFT)
            picture.rect(_LEFT, y, width, _BAR - 4, f"c{index}")
            picture.text(_LEFT + width + 8, y + 10, f"{value:+.1%}", "small")
    return picture.to_text()
