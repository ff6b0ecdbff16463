"""Plans a whole training: the best checkpoint interval, goodput, days and price."""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.planning.training import failures, formulas
from lingvo_gshard.planning.training.job import Job, JobOptions, assumptions, make_job
from lingvo_gshard.planning.training.record import Alternative, Goodput, Range
from lingvo_gshard.planning.training.simulation import SimulatedRuns, simulate

# Below this goodput a training is refused: it repeats its work more often than it keeps it.
_LOWEST_GOODPUT = 0.01
# More failures than these are not simulated: it would take minutes and change nothing.
_MOST_FAILURES = 1e9


def plan_training(plan: Plan, options: JobOptions) -> Goodput:
    """Returns what a training takes that repeats a plan's step, with failures and checkpoints.

    Args:
      plan: the plan of a training step.
      options: tokens, and what the plan does not know.

    Raises:
      UserError: an option is not a number in its range, or so many chips fail so often that the
        training makes almost no progress; names the flag.
    """
    job = make_job(plan, options)
    costs = job.costs
    interval = options.checkpoint_interval or job.best_interval()
    steps = max(1, round(interval / job.step))
    interval = steps * job.step
    expected = formulas.expected_goodput(costs, interval)
    if expected < _LOWEST_GOODPUT:
        raise UserError(_no_progress(job, interval, expected))
    _check_size(job, expected, options)
    runs = simulate(costs, job.work, interval, options.runs, options.seed, job.failure_rate.count)
    total = float(runs.seconds.sum())
    price = job.topology.chip.price
    days = job.days(1.0)
    per_second = job.price(1.0)
    return Goodput(
        tokens=options.tokens,
        steps=job.steps,
        chips=job.topology.chips,
        checkpoint_bytes=job.state_bytes,
        **dataclasses.asdict(costs),
        interval=interval,
        interval_steps=steps,
        young_interval=formulas.young_interval(costs),
        daly_interval=formulas.daly_interval(costs),
        goodput=dataclasses.replace(_range(runs.goodput), mean=_mean_goodput(runs)),
        formula_goodput=expected,
        days=_range(runs.seconds * days),
        days_without_failures=job.days(job.work),
        days_bound=job.days(job.steps * plan.seconds_per_step_bound),
        failures=_range(runs.failures),
        saving_share=float(runs.saving.sum()) / total,
        lost_share=float(runs.lost.sum()) / total,
        restarting_share=float(runs.restarting.sum()) / total,
        price=None if per_second is None else _range(runs.seconds * per_second),
        currency=price.currency if price else None,
        runs=options.runs,
        seed=options.seed,
        assumptions=assumptions(job, options),
        published_rates=_published_rates(job),
        sensitivities=_sensitivities(job),
    )


def _mean_goodput(runs: SimulatedRuns) -> float:
    return runs.work * len(runs.seconds) / float(runs.seconds.sum())


def _range(values: np.ndarray) -> Range:
    low, median, high = (float(value) for value in np.quantile(values, (0.05, 0.5, 0.95)))
    return Range(float(values.mean()), low, median, high)


def _published_rates(job: Job) -> list[Alternative]:
    return [
        _alternative(f"{rate.name}", dataclasses.replace(job, failure_rate=rate), "failures")
        for rate in failures.RATES.values()
    ]


def _sensitivities(job: Job) -> list[Alternative]:
    """Returns the job with half and twice each assumption, the largest effect first."""
    groups = []
    for name, field, flag in (
        ("time between failures", "failure_rate", "failures"),
        ("write and read rate", "host_rate", "checkpoint_rate"),
        ("wait for a checkpoint", "stall", "checkpoint_stall"),
        ("start after a failure", "detect", "restart"),
        ("compile after it", "compile", "compile_seconds"),
        ("time of a step", "step", ""),
    ):
        rows = [
            _alternative(f"{text} the {name}", _scaled(job, field, factor), flag)
            for text, factor in (("half", 0.5), ("twice", 2.0))
        ]
        groups.append(rows)
    groups.sort(key=lambda rows: -abs(rows[0].goodput - rows[1].goodput))
    # A slower step costs time and not goodput, so that it comes last.
    return [row for rows in groups for row in rows]


def _scaled(job: Job, field: str, factor: float) -> Job:
    value = getattr(job, field)
    if field == "failure_rate":
        value = dataclasses.replace(value, chip_hours=value.chip_hours * factor)
    else:
        value *= factor
    return dataclasses.replace(job, **{field: value})


def _alternative(change: str, job: Job, flag: str) -> Alternative:
    interval = job.best_interval()
    goodput = formulas.expected_goodput(job.costs, interval)
    if goodput < _LOWEST_GOODPUT:
        return Alternative(change, interval, 0.0, None, None, flag)
    seconds = job.work / goodput
    return Alternative(change, interval, goodput, job.days(seconds), job.price(seconds), flag)


def _check_size(job: Job, goodput: float, options: JobOptions) -> None:
    failures_of_a_run = job.work / goodput / job.costs.between_failures
    if failures_of_a_run * options.runs > _MOST_FAILURES:
        raise UserError(
            f"--simulated_runs={options.runs} of --tokens={options.tokens:g} have "
            f"{failures_of_a_run:.3g} failures each; expected at most {_MOST_FAILURES:g} in all "
            "runs: simulate fewer runs, or train on fewer tokens"
        )


def _no_progress(job: Job, interval: float, goodput: float) -> str:
    costs = job.costs
    return (
        f"--goodput: {job.topology.chips:,} chips fail every {costs.between_failures:.3g} s on "
        f"average, while a restart takes {costs.restart:.3g} s, a checkpoint {costs.write:.3g} s "
        f"to write and {interval:.3g} s of work lie between two: {goodput:.2%} of the time would "
        "make progress. Expected at least 1%: fewer chips, a higher --failures (chip-hours), "
        "--checkpoint_rate or a lower --restart"
    )
