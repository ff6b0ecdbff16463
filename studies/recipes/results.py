"""The scores of ways to train, and how they differ from the first way seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from lingvo_gshard.api import tables
from lingvo_gshard.tasks.evaluation import Table, perplexity
from lingvo_gshard.tools.console import output
from lingvo_gshard.wings.services import metrics_rows
from studies.member import Member


class RunResult(msgspec.Struct, frozen=True):
    """Scores of one run on its dev split.

    Attributes:
      experiment: name of the experiment.
      way: name of the way to train it.
      seed: the run's seed.
      step: step of the checkpoint that was scored.
      perplexity: of the references.
      chrf: of greedy translations, the mean over languages; None for a language model.
      training_perplexity: of the last fifth of the steps, on the batches that they train with.
    """

    experiment: str
    way: str
    seed: int
    step: int
    perplexity: float
    chrf: float | None
    training_perplexity: float


def read(members: Sequence[Member]) -> list[RunResult]:
    """Returns the scores of runs that are scored."""
    return [_result(member) for member in members]


def show(console: output.Console, found: Sequence[RunResult]) -> None:
    """Prints a table for each experiment."""
    if not found:
        console.say("No run is trained and scored yet.")
    for experiment in dict.fromkeys(run.experiment for run in found):
        console.say(f"\n{experiment}, scored on dev")
        table = comparison([run for run in found if run.experiment == experiment])
        tables.print_table(console, tables.rich_table(table))


def comparison(runs: Sequence[RunResult]) -> Table:
    """Returns a row for each way, in the order of runs, compared with the way of the first run.

    A difference is a mean over seeds that both ways have, and, after ±, the standard error of that
    mean. Perplexity in training is measured on many more tokens than a small split has, the same
    in all ways.
    """
    by_way: dict[str, dict[int, RunResult]] = {}
    for run in runs:
        by_way.setdefault(run.way, {})[run.seed] = run
    first = next(iter(by_way.values()))
    has_chrf = runs[0].chrf is not None
    columns = ["way", "seeds", "steps", "perplexity", "against the first"]
    columns += ["chrF", "difference"] if has_chrf else []
    columns += ["in training", "against that of the first"]
    rows = []
    for name, seeds in by_way.items():
        pairs = [(seeds[seed], first[seed]) for seed in seeds if seed in first]
        values = list(seeds.values())
        row = [name, f"{len(values)}", f"{max(run.step for run in values):,}"]
        row.append(f"{statistics.mean(run.perplexity for run in values):.3f}")
        changes = [(own.perplexity / base.perplexity - 1) * 100 for own, base in pairs]
        row.append(_spread(changes, "%"))
        trained = [own.training_perplexity / base.training_perplexity for own, base in pairs]
        if has_chrf:
            row.append(f"{statistics.mean(run.chrf or 0 for run in values):.2f}")
            row.append(_spread([(own.chrf or 0) - (base.chrf or 0) for own, base in pairs]))
        row.append(f"{statistics.mean(run.training_perplexity for run in values):.3f}")
        row.append(_spread([(ratio - 1) * 100 for ratio in trained], "%"))
        rows.append(row)
    return Table(columns, rows)


def _result(member: Member) -> RunResult:
    row = member.evaluation
    assert row is not None
    average = row.scores.get("average")
    return RunResult(
        experiment=member.model,
        way=member.variant,
        seed=member.seed,
        step=row.step,
        perplexity=perplexity(row.scores["cross_entropy"]),
        chrf=average["translated"]["chrf"] if average else None,
        training_perplexity=_training_perplexity(member),
    )


def _training_perplexity(member: Member) -> float:
    """Returns the perplexity of the last fifth of the steps; see `RunResult`."""
    rows = metrics_rows.rows_of_run(member.logdir)
    last = rows[-max(1, len(rows) // 5) :]
    return perplexity(statistics.mean(row["cross_entropy"] for row in last))


def _spread(changes: Sequence[float], unit: str = "") -> str:
    """Returns the mean of differences and its standard error, in words."""
    if not changes:
        return "-"
    mean = f"{statistics.mean(changes):+.2f}{unit}"
    if len(changes) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(changes) / len(changes) ** 0.5:.2f}"
