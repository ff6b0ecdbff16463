"""Writes docs/planned_and_published.md: its text, and tables of trainings and their plans."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence

from docs.planned.page import large, table
from docs.planned.published.rows import PlannedTraining, PlannedTrainings
from docs.planned.published.training import Training
from docs.planned.published.trainings import TRAININGS
from lingvo_gshard.wings.planning import operation_rows
from lingvo_gshard.wings.planning.machines import compilers, topologies

PAGE = pathlib.Path(__file__).parents[2] / "planned_and_published.md"
TEXT = pathlib.Path(__file__).parent / "page.md"
_GIB = 2**30
# Kinds of work that have a column of their own.
_SHOWN = (operation_rows.PRODUCTS, operation_rows.ATTENTION, operation_rows.COLLECTIVES)


def write(found: PlannedTrainings) -> None:
    """Writes the page."""
    PAGE.write_text(text(found), encoding="utf-8")


def text(found: PlannedTrainings) -> str:
    """Returns the page: page.md with a table in place of each `{...}`."""
    planned = [(each, found[each.key]) for each in TRAININGS if each.key in found]
    tables = {
        "results": table(
            ("model", "program", "machine", "mesh", "published", "estimate", "bound", "ratio")
            + ("predicted", "published MFU", "planned MFU"),
            [_result(each, row) for each, row in planned],
        ),
        "times": table(
            ("model", "machine", "step", "products", "attention: products", "attention: rest")
            + ("exposed collectives", "other", "hidden collectives", "all hidden"),
            [_times(each, row) for each, row in planned],
        ),
        "configurations": table(
            ("model", "machine", "strategy", "rows", "length", "recomputed", "GiB of a device")
            + ("how the plan differs", "source"),
            [_configuration(each, row) for each, row in planned],
        ),
        "ratios": _ratios(planned),
        "groups": table(("trainings", "rows", "ratios", "geometric mean"), groups(planned)),
        "experts": table(
            ("model", "program", "machine", "ratio", "products", "attention")
            + ("routing and dispatch", "exchanges and gathers of experts", "of it exposed")
            + ("what separates the estimate from the measurement",),
            [_experts(each, row) for each, row in planned if each.has_experts],
        ),
        **_ranges(planned),
        "compiler_versions": ", ".join(sorted({_versions(row) for _, row in planned})),
    }
    page = TEXT.read_text(encoding="utf-8")
    for name, content in tables.items():
        page = page.replace(f"{{{name}}}", content)
    return page


def _result(training: Training, row: PlannedTraining) -> tuple[str, ...]:
    estimate = row.tokens_per_second_of_chip
    return (
        training.name,
        training.publisher,
        _machine(training),
        training.mesh.replace(",", " "),
        large(training.published),
        large(estimate),
        large(row.tokens / row.bound / row.chips),
        f"{_ratio(training, row):.2f}",
        f"{_ratio(training, row) * row.seconds / row.predicted:.2f}" if row.predicted else "-",
        f"{utilization(training, training.published):.0%}",
        f"{utilization(training, estimate):.0%}",
    )


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Where the time of a step goes.

    Attributes:
      shares: of products, products of attention, the rest of attention, collectives that the step
        waits for, others, and collectives that computation hides. All but the last make the step.
      all_hidden: the measured seconds over the estimated ones if computation hid all collectives.
    """

    shares: tuple[float, ...]
    all_hidden: float

    @property
    def rest(self) -> float:
        """The share of the rest of attention."""
        return self.shares[2]


def _parts(training: Training, row: PlannedTraining) -> _Parts:
    attention = min(row.attention_products, row.kinds[operation_rows.ATTENTION])
    rest = row.kinds[operation_rows.ATTENTION] - attention
    collectives = row.kinds.get(operation_rows.COLLECTIVES, 0.0)
    other = sum(seconds for kind, seconds in row.kinds.items() if kind not in _SHOWN)
    parts = (row.kinds[operation_rows.PRODUCTS], attention, rest, collectives, other, row.hidden)
    measured = row.tokens / row.chips / training.published
    return _Parts(
        shares=tuple(seconds / row.seconds for seconds in parts),
        all_hidden=measured / max(row.seconds - collectives, collectives + row.hidden),
    )


def _times(training: Training, row: PlannedTraining) -> tuple[str, ...]:
    parts = _parts(training, row)
    return (
        training.name,
        _machine(training),
        f"{row.seconds:.2f} s",
        *(f"{share:.0%}" for share in parts.shares),
        f"{parts.all_hidden:.2f}",
    )


def _ranges(planned: Iterable[tuple[Training, PlannedTraining]]) -> dict[str, str]:
    """Returns ranges of columns over groups of rows, for the text."""
    all_parts = [(each, row, _parts(each, row)) for each, row in planned]
    tpus = [parts for _, row, parts in all_parts if row.compiler == "tpu"]
    h100 = [parts for _, row, parts in all_parts if row.machine == "h100"]
    ratios = {each.key: _ratio(each, row) for each, row, _ in all_parts}
    titan = [ratios[each.key] for each, _, _ in all_parts if each.publisher == "torchtitan"]
    of_tpus = [ratios[each.key] for each, row, _ in all_parts if row.compiler == "tpu"]
    old = [
        ratios[each.key]
        for each, row, _ in all_parts
        if row.machine == "a100" and "model" in row.mesh
    ]
    return {
        "tpu_rest": _range("{:.0%}", [parts.rest for parts in tpus]),
        "h100_rest": _range("{:.0%}", [parts.rest for parts in h100]),
        "tpu_hidden": _range("{:.2f}", [parts.all_hidden for parts in tpus]),
        "tpu_ratio": _range("{:.2f}", of_tpus),
        "titan_ratio": _range("{:.2f}", titan),
        "a100_tensor": _range("{:.2f}", old),
    }


def _range(form: str, values: Sequence[float]) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}"


def _configuration(training: Training, row: PlannedTraining) -> tuple[str, ...]:
    memory = f"{row.peak / _GIB:.0f} of {row.capacity / _GIB:.0f}"
    return (
        training.name,
        _machine(training),
        f"`{training.strategy}`",
        f"{training.rows:,}",
        f"{training.length:,}",
        training.rematerialize,
        memory if row.fits else f"{memory}: does not fit",
        training.planned or "-",
        f"[{training.publisher}]({training.source})",
    )


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
    """Returns a sentence on the ratios of estimates to measurements."""
    ratios = [_ratio(each, row) for each, row in planned]
    return (
        f"Over {len(ratios)} trainings, the estimate is {_range('{:.2f}', ratios)} times the "
        f"measurement, {_mean(ratios):.2f} times in the geometric mean."
    )


def groups(planned: Iterable[tuple[Training, PlannedTraining]]) -> list[tuple[str, ...]]:
    """Returns a row for each program, kind of machine and kind of model."""
    ratios_by_group: dict[str, list[float]] = {}
    for training, row in planned:
        program, _, _ = training.publisher.partition(" 2")
        machine = "TPU" if row.compiler == "tpu" else row.machine.upper()
        model = "experts" if training.has_experts else "dense"
        ratio = _ratio(training, row)
        ratios_by_group.setdefault(f"{program}, {machine}, {model}", []).append(ratio)
    return [
        (name, str(len(ratios)), _range("{:.2f}", ratios), f"{_mean(ratios):.2f}")
        for name, ratios in sorted(ratios_by_group.items())
    ]


def _experts(training: Training, row: PlannedTraining) -> tuple[str, ...]:
    exposed, hidden = row.exchanges
    kinds = (operation_rows.PRODUCTS, operation_rows.ATTENTION, operation_rows.ROUTING)
    times = [row.kinds.get(kind, 0.0) for kind in kinds]
    return (
        training.name,
        training.publisher,
        _machine(training),
        f"{_ratio(training, row):.2f}",
        *(f"{seconds / row.seconds:.0%}" for seconds in (*times, exposed + hidden, exposed)),
        training.term or "-",
    )
