"""Plans the paper's experiments and compares them with its published figures."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.wings.planning.compiling.cache import current_settings, using_settings
from lingvo_gshard.wings.planning.plan.plan import (
    FlopCounts,
    MemoryBytes,
    ParameterCounts,
    Plan,
    Record,
)
from studies.paper import comparison as paper
from studies.paper import rows as paper_rows
from studies.paper.comparison import Case, Comparison, ComparisonRow

FORMAT = 1


class PlanSummary(Record, frozen=True, kw_only=True):
    """The headline figures of a plan. See `Case` and `Plan` for the attributes."""

    experiment: str
    topology: str
    settings: dict[str, object]
    devices: int
    compiler: str
    fits: bool
    bytes_per_device: MemoryBytes
    parameters: ParameterCounts
    flops: FlopCounts
    seconds_per_step: float
    steps_per_second: float | None
    steps_per_second_bound: float | None
    tokens_per_step: int | None
    mfu: float | None
    compile_seconds: float
    versions: dict[str, str]
    notes: list[str]


class PaperReport(Record, frozen=True, kw_only=True):
    """All comparisons with the paper.

    Attributes:
      format: version of the file format.
      rows: the comparisons.
      plans: summaries of the plans, by name of their case.
      left_out: published figures that are not compared, with the reason.
    """

    format: int = FORMAT
    rows: list[ComparisonRow]
    plans: dict[str, PlanSummary]
    left_out: dict[str, str]


def make_report(chosen: Sequence[str], plan_case: Callable[[Case], Plan]) -> PaperReport:
    """Plans the cases of the chosen comparisons and compares them with the paper.

    A case that cannot be planned leaves its comparisons without figures; each gives the reason.

    Args:
      chosen: names, quantities or models of comparisons; all comparisons if empty.
      plan_case: plans a case; ValueError if it cannot be planned.

    Raises:
      UserError: names `rows` if a name is unknown.
    """
    comparisons = paper_rows.select(chosen)
    to_the_end = {name for row in comparisons if row.needs_code for name in row.cases}
    plans: dict[str, Plan] = {}
    failures: dict[str, str] = {}
    for case in paper_rows.cases_of(comparisons):
        has_code = case.name in to_the_end
        try:
            with using_settings(dataclasses.replace(current_settings(), generates_code=has_code)):
                plans[case.name] = plan_case(case)
        except UserError as error:
            failures[case.name] = str(error)
        # JAX's caches of one program take as much memory as planning the next one.
        jax.clear_caches()
        gc.collect()
    return PaperReport(
        rows=[_row(comparison, plans, failures) for comparison in comparisons],
        plans={name: _summary(paper_rows.CASES[name], plan) for name, plan in plans.items()},
        left_out=dict(paper_rows.LEFT_OUT),
    )


def case_params(case: Case) -> Params:
    """Returns the Params of a case's experiment with the case's settings."""
    params = registry.get(case.experiment)
    for path, value in case.settings.items():
        params.set_path(path, value)
    return params


def _row(
    comparison: Comparison, plans: Mapping[str, Plan], failures: Mapping[str, str]
) -> ComparisonRow:
    reasons = [failures[name] for name in comparison.cases if name in failures]
    if reasons:
        return paper.not_compared(comparison, " ".join(reasons))
    return paper.compare(comparison, plans)


def _summary(case: Case, plan: Plan) -> PlanSummary:
    return PlanSummary(
        experiment=case.experiment,
        topology=case.topology,
        settings=dict(case.settings),
        devices=plan.devices,
        compiler=plan.compiler,
        fits=plan.fits,
        bytes_per_device=plan.bytes_per_device,
        parameters=plan.parameters,
        flops=plan.flops,
        seconds_per_step=plan.seconds_per_step,
        steps_per_second=plan.steps_per_second,
        steps_per_second_bound=plan.steps_per_second_bound,
        tokens_per_step=plan.tokens_per_step,
        mfu=plan.mfu,
        compile_seconds=plan.compile_seconds,
        versions=plan.versions,
        notes=plan.notes,
    )
