"""The scores of a study's language models, by kind of text, as a record and as tables."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lingvo_gshard.api import tables
from lingvo_gshard.tasks.evaluation import Table
from lingvo_gshard.tools.console import output
from studies.experts.results import in_millions, spread
from studies.member import Member

ALL = "all"


class TextResult(msgspec.Struct, frozen=True):
    """Scores of one run.

    Attributes:
      model: name of the model.
      seed: its seed.
      step: step of the checkpoint that was scored.
      parameters: number of the model's parameters.
      active_parameters: number of those that each token uses.
      bits_per_byte: of all texts.
      perplexity: ALL and kind of text -> perplexity per token.
      tokens: ALL and kind of text -> number of tokens scored.
    """

    model: str
    seed: int
    step: int
    parameters: int
    active_parameters: int
    bits_per_byte: float
    perplexity: dict[str, float]
    tokens: dict[str, int]


def read(members: Sequence[Member]) -> list[TextResult]:
    """Returns the scores of runs that are scored."""
    return [_result(member) for member in members]


def show(console: output.Console, found: Sequence[TextResult]) -> None:
    """Prints tables of the runs' scores."""
    if not found:
        console.say("No model is trained and scored yet.")
        return
    by_model: dict[str, list[TextResult]] = {}
    for run in found:
        by_model.setdefault(run.model, []).append(run)
    for title, table in (
        ("Models", _models_table(by_model)),
        ("Perplexity by kind of text", _kinds_table(by_model)),
    ):
        console.say(f"\n{title}")
        tables.print_table(console, tables.rich_table(table))


def _result(member: Member) -> TextResult:
    row, started = member.evaluation, member.launch
    assert row is not None
    scores = {ALL: row.scores, **row.scores["sources"]}
    return TextResult(
        model=member.label,
        seed=member.seed,
        step=row.step,
        parameters=started.parameters,
        active_parameters=started.active_parameters,
        bits_per_byte=row.scores["bits_per_byte"],
        perplexity={name: one["perplexity"] for name, one in scores.items()},
        tokens={name: one["tokens"] for name, one in scores.items()},
    )


def _models_table(by_model: dict[str, list[TextResult]]) -> Table:
    rows = []
    for name, runs in by_model.items():
        first = runs[0]
        rows.append(
            [
                name,
                in_millions(first.parameters),
                in_millions(first.active_parameters),
                f"{len(runs)}",
                spread([run.perplexity[ALL] for run in runs], 2),
                spread([run.bits_per_byte for run in runs], 3),
            ]
        )
    columns = ["model", "parameters", "of a token", "seeds", "perplexity", "bits per byte"]
    return Table(columns, rows)


def _kinds_table(by_model: dict[str, list[TextResult]]) -> Table:
    first = next(iter(by_model.values()))[0]
    rows = []
    for kind in sorted(first.tokens, key=lambda kind: (kind != ALL, -first.tokens[kind])):
        cells = [kind, f"{first.tokens[kind]:,}"]
        for runs in by_model.values():
            cells.append(spread([r.perplexity[kind] for r in runs if kind in r.perplexity], 2))
        rows.append(cells)
    return Table(["text", "tokens", *by_model], rows)
