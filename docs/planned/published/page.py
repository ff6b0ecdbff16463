"""Writes docs/planned_and_published.md, and table.md beside this file: text and tables."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Sequence

from docs.planned import cells
from docs.planned import page as open_models
from docs.planned.page import large, table
from docs.planned.published.rows import PlannedTraining, PlannedTrainings
from docs.planned.published.training import Training
from docs.planned.published.trainings import TRAININGS
from lingvo_gshard.wings.planning.machines import compilers, topologies

_FOLDER = pathlib.Path(__file__).parent
PAGE = _FOLDER.parents[1] / "planned_and_published.md"
TABLE = _FOLDER / "table.md"
# Each page, and its text with a name in braces in place of each table.
TEXTS = {PAGE: _FOLDER / "page.md", TABLE: _FOLDER / "table_text.md"}


def write(found: PlannedTrainings) -> None:
    """Writes the pages."""
    for page in TEXTS:
        page.write_text(text(page, found), encoding="utf-8")


def text(page: pathlib.Path, found: PlannedTrainings) -> str:
    """Returns the text of a page, with its tables."""
    planned = [(each, found[each.key]) for each in TRAININGS if each.key in found]
    tables = {
        "open_models": open_models.text(cells.load()),
        "results": table(
            ("model", "program", "machine", "published", "estimate", "ratio", "published MFU"),
            [_result(each, row) for each, row in planned],
        ),
        "ratios": _ratios(planned),
        "groups": table(("trainings", "rows", "ratios", "mean"), groups(planned)),
        "differences": _listed(planned, [each.planned.split("; ") for each, _ in planned], 3),
        "terms": _listed(planned, [[each.term] for each, _ in planned]),
        "too_large": ", ".join(_names([each for each, row in planned if not row.fits])),
        "compiler_versions": ", ".join(sorted({_versions(row) for _, row in planned})),
    }
    made = TEXTS[page].read_text(encoding="utf-8")
    for name, content in tables.items():
        made = made.replace(f"{{{name}}}", content)
    return made


def _result(training: Training, row: PlannedTraining) -> tuple[str, ...]:
    estimate = row.tokens_per_second_of_chip
    return (
        training.name,
        f"[{training.publisher}]({training.source})",
        _machine(training),
        large(training.published),
        large(estimate),
        f"{_ratio(training, row):.2f}",
        f"{utilization(training, training.published):.0%}",
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _listed(
    planned: Sequence[tuple[Training, PlannedTraining]],
    clauses: Sequence[Sequence[str]],
    fewest: int = 1,
) -> str:
    """Returns a list of clauses, each with the trainings that it holds for.

    Args:
      planned: the trainings.
      clauses: those of each training.
      fewest: clauses that hold for fewer models on a machine are left out.
    """
    trainings: dict[str, list[Training]] = {}
    for (training, _), each in zip(planned, clauses, strict=True):
        for clause in filter(None, each):
            trainings.setdefault(clause, []).append(training)
    names = {clause: _names(of) for clause, of in trainings.items()}
    return "\n".join(
        f"- {clause} ({', '.join(each)})" for clause, each in names.items() if len(each) >= fewest
    )


def _names(trainings: Iterable[Training]) -> list[str]:
    """Returns model and machine of each training, once."""
    return list(dict.fromkeys(f"{each.name} on {_machine(each)}" for each in trainings))


def _machine(training: Training) -> str:
    topology = topologies.get(training.topology)
    return f"{topology.chips} {topology.chip.key}"


def _versions(row: PlannedTraining) -> str:
    name = compilers.PACKAGES[row.compiler]
    return f"{name} {row.versions[name]}"


def utilization(training: Training, tokens: float) -> float:
    """Returns the model FLOPs utilization of a training.

    Args:
      training: the training.
      tokens: tokens per second of a chip.
    """
    chip = topologies.get(training.topology).chip
    peak = chip.partitions * chip.peak("bf16")
    return tokens * training.decoder.flops_per_token(training.length) / peak


def _ratio(training: Training, row: PlannedTraining) -> float:
    """Returns the estimated speed over the published one."""
    return row.tokens_per_second_of_chip / training.published


def _mean(ratios: Sequence[float]) -> float:
    """Returns the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _ratios(planned: Sequence[tuple[Training, PlannedTraining]]) -> str:
    """Returns sentences on the ratios of estimates to measurements."""
    ratios = [_ratio(each, row) for each, row in planned]
    first = [
        _ratio(each, row) * row.seconds / row.predicted for each, row in planned if row.predicted
    ]
    return (
        f"Over {len(ratios)} trainings, the estimate is {_range(ratios)} times the measurement, "
        f"{_mean(ratios):.2f} times in the geometric mean. The first plan of {len(first)} of them "
        "was written down before it was compared with the measurement: "
        f"{_range(first)} times, {_mean(first):.2f} in the mean."
    )


def groups(planned: Iterable[tuple[Training, PlannedTraining]]) -> list[tuple[str, ...]]:
    """Returns a row for each program, kind of machine and kind of model."""
    by_group: dict[str, list[float]] = {}
    for training, row in planned:
        program, _, _ = training.publisher.partition(" 2")
        machine = "TPU" if row.compiler == "tpu" else row.machine.upper()
        model = "experts" if training.has_experts else "dense"
        by_group.setdefault(f"{program}, {machine}, {model}", []).append(_ratio(training, row))
    return [
        (name, str(len(ratios)), _range(ratios), f"{_mean(ratios):.2f}")
        for name, ratios in sorted(by_group.items())
    ]
