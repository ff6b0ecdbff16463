"""The scores of a study's runs, by groups of languages, as a record and as tables."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from lingvo_gshard.api import tables
from lingvo_gshard.tasks.evaluation import Table, WeightedMeans
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.experts.report import family
from lingvo_gshard.wings.evaluation.likelihood import Likelihood, combined
from lingvo_gshard.wings.preparation.prepared.manifest import Manifest
from studies.member import Member

ALL = "all"
THIRDS = ("most text", "middle", "least text")


class Scores(msgspec.Struct, frozen=True):
    """Scores of a model for a group of languages.

    Attributes:
      rows: number of test rows.
      perplexity: of the references; each token counts the same.
      chrf: mean of the languages' chrF, weighted by rows.
      bleu: mean of the languages' BLEU, weighted by rows.
    """

    rows: int
    perplexity: float
    chrf: float
    bleu: float


class RunResult(msgspec.Struct, frozen=True):
    """Scores of one run.

    Attributes:
      model: name of the model.
      seed: its seed.
      language: the language of a bilingual model; empty for all.
      step: step of the checkpoint that was scored.
      parameters: number of the model's parameters.
      active_parameters: number of those that each token uses.
      thirds: ALL and each of THIRDS -> scores.
      families: family -> scores.
      languages: language -> scores.
    """

    model: str
    seed: int
    language: str
    step: int
    parameters: int
    active_parameters: int
    thirds: dict[str, Scores]
    families: dict[str, Scores]
    languages: dict[str, Scores]


def read(members: Sequence[Member], manifest: Manifest) -> list[RunResult]:
    """Returns the scores of runs.

    Args:
      members: runs that are scored.
      manifest: the prepared data, whose training rows order the languages.
    """
    thirds = thirds_of({name: row.kept.get("train", 0) for name, row in manifest.languages.items()})
    return [_result(member, thirds) for member in members]


def thirds_of(rows: dict[str, int]) -> dict[str, str]:
    """Returns language -> one of THIRDS, by its number of training rows."""
    ordered = sorted(rows, key=lambda language: (-rows[language], language))
    size = math.ceil(len(ordered) / len(THIRDS))
    return {language: THIRDS[index // size] for index, language in enumerate(ordered)}


def grouped(found: dict[str, dict], group_of: dict[str, str]) -> dict[str, Scores]:
    """Returns group -> scores of its languages.

    Args:
      found: language -> scores, as an evaluation records them.
      group_of: language -> its group.
    """
    groups = collections.defaultdict(list)
    for language, scores in found.items():
        groups[group_of[language]].append(scores)
    return {group: _pooled(members) for group, members in groups.items()}


def show(console: output.Console, found: Sequence[RunResult]) -> None:
    """Prints tables of the runs' scores."""
    models = [result for result in found if not result.language]
    if not models:
        console.say("No model of all languages is trained and scored yet.")
        return
    names = list(dict.fromkeys(result.model for result in models))
    by_model = {name: [run for run in models if run.model == name] for name in names}
    for title, table in (
        ("Perplexity and chrF by amount of training text", _thirds_table(by_model)),
        ("Perplexity by family of languages", _families_table(by_model)),
        ("chrF of bilingual models and of models of all languages", _gain_table(by_model, found)),
    ):
        if table.rows:
            console.say(f"\n{title}")
            tables.print_table(console, tables.rich_table(table))


def _result(member: Member, thirds: dict[str, str]) -> RunResult:
    row, started = member.evaluation, member.launch
    assert row is not None
    languages: dict[str, dict[str, Any]] = row.scores["languages"]
    everything = dict.fromkeys(languages, ALL)
    return RunResult(
        model=member.label,
        seed=member.seed,
        language=member.language,
        step=row.step,
        parameters=started.parameters,
        active_parameters=started.active_parameters,
        thirds=grouped(languages, everything) | grouped(languages, thirds),
        families=grouped(languages, {name: family(name) for name in languages}),
        languages=grouped(languages, {name: name for name in languages}),
    )


def _pooled(scores: Sequence[dict]) -> Scores:
    means = WeightedMeans()
    for row in scores:
        means.add({name: (row["translated"][name], row["rows"]) for name in ("chrf", "bleu")})
    fields = [field.name for field in dataclasses.fields(Likelihood)]
    likelihood = combined(Likelihood(**{name: row[name] for name in fields}) for row in scores)
    rows = sum(row["rows"] for row in scores)
    return Scores(rows, likelihood.perplexity, **means.means())


def _thirds_table(by_model: dict[str, list[RunResult]]) -> Table:
    groups = (ALL, *THIRDS)
    columns = ["model", "parameters", "of a token", "seeds"]
    columns += [f"perplexity\n{group}" for group in groups] + [f"chrF\n{group}" for group in groups]
    rows = []
    for name, runs in by_model.items():
        first = runs[0]
        cells = [name, in_millions(first.parameters), in_millions(first.active_parameters)]
        cells.append(f"{len(runs)}")
        for field in ("perplexity", "chrf"):
            for group in groups:
                there = [run.thirds[group] for run in runs if group in run.thirds]
                cells.append(spread([getattr(scores, field) for scores in there]))
        rows.append(cells)
    return Table(columns, rows)


def _families_table(by_model: dict[str, list[RunResult]]) -> Table:
    first = next(iter(by_model.values()))[0]
    names = sorted(first.families, key=lambda name: -first.families[name].rows)
    rows = []
    for name in names:
        cells = [name, f"{first.families[name].rows:,}"]
        for runs in by_model.values():
            cells.append(spread([run.families[name].perplexity for run in runs]))
        rows.append(cells)
    return Table(["family", "rows", *by_model], rows)


def _gain_table(by_model: dict[str, list[RunResult]], found: Sequence[RunResult]) -> Table:
    rows = []
    for run in found:
        if run.language:
            own = run.languages[run.language]
            cells = [run.language, f"{own.rows:,}", f"{run.step:,}", f"{own.chrf:.1f}"]
            for runs in by_model.values():
                there = [other.languages[run.language].chrf for other in runs]
                cells.append(spread(there))
            rows.append(cells)
    return Table(["language", "rows", "best step", "bilingual", *by_model], rows)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Returns the mean of a model's seeds and half of their range, in words."""
    if not values:
        return "-"
    mean = f"{sum(values) / len(values):.{digits}f}"
    half = (max(values) - min(values)) / 2
    return mean if len(values) == 1 else f"{mean} ± {half:.{digits}f}"


def in_millions(count: int) -> str:
    """Returns a number of weights in words."""
    return f"{count / 1e6:.1f}M"
