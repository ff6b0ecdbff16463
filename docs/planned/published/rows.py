"""PlannedTrainings: the plan of a training that somebody measured."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping

from docs.planned import cells
from docs.planned.cells import Cell
from docs.planned.published.training import Training
from lingvo_gshard.wings.planning import operation_rows
from lingvo_gshard.wings.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.wings.planning.machines import efficiencies, topologies
from lingvo_gshard.wings.planning.plan.plan import Plan

RESULTS = pathlib.Path(__file__).parent / "results.jsonl"
# The work of a row, the third part of its key.
_WORK = "published"
_BILLION = 1e9
# In the path of every layer that may have experts.
_EXPERTS = "feed_forward"


class PlannedTraining(Cell, frozen=True, kw_only=True):
    """The plan of a published training. `model` is the key of the training.

    Attributes:
      fits: whether the step fits. If not, its time is that of a chip with more memory.
      bound: seconds of a step at all peak rates, with communication hidden.
      kinds: estimated seconds of a step by kind of work; of communication, those that it waits for.
      hidden: estimated seconds of communication that computation hides.
      attention_products: those of the matrix products of attention alone.
      exchanges: those of communication in layers with experts, exposed and hidden.
      predicted: seconds of a step by the first plan, which was written before it was compared with
        the measurement; 0 for rows that are older than this rule.
      versions: the compiler and what else decides the plan.
    """

    fits: bool
    bound: float
    kinds: Mapping[str, float]
    hidden: float
    attention_products: float
    versions: Mapping[str, str]
    exchanges: tuple[float, float] = (0.0, 0.0)
    predicted: float = 0.0

    @property
    def tokens_per_second_of_chip(self) -> float:
        """The estimated tokens per second of a chip."""
        return self.tokens_per_second / self.chips


PlannedTrainings = Mapping[str, PlannedTraining]


def load() -> dict[str, PlannedTraining]:
    """Returns the rows by the keys of their trainings."""
    return {row.model: row for row in cells.read(RESULTS, PlannedTraining).values()}


def save(rows: PlannedTrainings) -> None:
    """Writes the rows."""
    cells.save(rows.values(), RESULTS)


def make(training: Training, before: PlannedTraining | None = None) -> PlannedTraining:
    """Plans a training as it was measured, with nothing fitted.

    Args:
      training: the training.
      before: its row so far, whose prediction is kept.
    """
    started = time.monotonic()
    topology = topologies.get(training.topology)
    settings = [
        f"input.batch_rows = {training.rows}",
        f'task.decoder.execution.rematerialize = "{training.rematerialize}"',
        f'step.precision = "{training.precision}"',
        f"input.most_segments = {training.segments}",
        f"step.micro_batches = {training.passes}",
        *training.settings,
    ]
    params = training.decoder.experiment(training.length, settings)
    options = PlanOptions(
        mesh=training.mesh,
        strategy=training.strategy,
        tokens=_BILLION,
        compile_options=training.compile_options,
    )
    plan = plan_experiment(params, topology, options)
    assert plan.budget
    attention = next(row for row in plan.kinds if row.kind == operation_rows.ATTENTION)
    rate = efficiencies.matmul_efficiency(topology.chip, attention.flops).value
    rate *= topology.chip.peak("bf16")
    return PlannedTraining(
        model=training.key,
        machine=topology.chip.key,
        work=_WORK,
        **cells.facts_of(plan, plan.budget, topology),  # pyright: ignore[reportArgumentType]
        mesh=training.mesh,
        strategy=training.strategy,
        fits=plan.fits,
        bound=plan.seconds_per_step_bound,
        kinds={row.kind: row.seconds for row in plan.kinds},
        hidden=sum(row.hidden_seconds for row in plan.collectives),
        attention_products=attention.flops / rate,
        exchanges=_exchanges(plan),
        predicted=predicted(before, plan.seconds_per_step),
        versions=plan.versions,
        made_in=round(time.monotonic() - started, 1),
    )


def predicted(before: PlannedTraining | None, seconds: float) -> float:
    """Returns the seconds of a step by the first plan of a training.

    Args:
      before: the row so far.
      seconds: those of this plan.
    """
    return before.predicted if before else seconds


def _exchanges(plan: Plan) -> tuple[float, float]:
    """Returns the seconds of communication in layers with experts, exposed and hidden."""
    rows = [row for row in plan.collectives if _EXPERTS in row.layer]
    return sum(row.seconds for row in rows), sum(row.hidden_seconds for row in rows)
