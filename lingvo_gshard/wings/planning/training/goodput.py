"""Plans a whole training: the best checkpoint interval, goodput, days and price."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.training import formulas
from lingvo_gshard.wings.planning.training.formulas import RATES, Interruptions
from lingvo_gshard.wings.planning.training.goodput_record import Alternative, Goodput, Range
from lingvo_gshard.wings.planning.training.job import Job, JobOptions, assumptions, make_job

# Random numbers that are drawn at once, so that memory stays small.
_BLOCK = 2_000_000


@dataclasses.dataclass(frozen=True)
class SimulatedRuns:
    """Simulated trainings. Times are in seconds; S is the number of runs.

    Attributes:
      seconds: [S] time from the start to the last complete checkpoint.
      failures: [S] number of failures.
      restarting: [S] time of starting and restarting.
      saving: [S] time that the training stopped for checkpoints. Checkpoints of work that a failure
        undid are not counted.
      work: time of the training without failures and checkpoints.
    """

    seconds: np.ndarray
    failures: np.ndarray
    restarting: np.ndarray
    saving: np.ndarray
    work: float

    @property
    def goodput(self) -> np.ndarray:
        """[S] The part of each run's time that made progress."""
        return self.work / self.seconds

    @property
    def lost(self) -> np.ndarray:
        """[S] Time of work that failures undid, and of waiting for the last checkpoint."""
        return self.seconds - self.work - self.saving - self.restarting


def simulate(
    costs: Interruptions,
    work: float,
    interval: float,
    runs: int,
    seed: int = 0,
    counted: int | None = None,
) -> SimulatedRuns:
    """Returns simulated trainings.

    A run is a sequence of attempts. Each begins with a restart, the first one with the start, and
    ends with a failure or with the end of the training. Times between failures are exponentially
    distributed. All attempts of all runs are drawn together, in blocks.

    Args:
      counted: number of failures that the rate was estimated from. If given, each run has a rate of
        its own, from the gamma distribution that so many counts leave.
    """
    generator = np.random.default_rng(seed)
    mean = np.full(runs, costs.between_failures)
    if counted:
        mean /= generator.gamma(counted, 1 / counted, runs)
    totals, kept, left = np.zeros((3, runs)), np.zeros(runs), np.arange(runs)
    for width in _widths(costs, work, interval, runs):
        until = generator.exponential(1.0, (len(left), width)) * mean[left, None]
        added, kept[left], is_done = _continue(costs, work, interval, until, kept[left])
        totals[:, left] += added
        left = left[~is_done]
        if not len(left):
            break
    saving = np.full(runs, np.ceil(work / interval) * costs.stall)
    seconds, failures, restarting = totals
    return SimulatedRuns(seconds, failures, restarting, saving, work)


def _continue(
    costs: Interruptions, work: float, interval: float, until: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Continues runs by a block of A attempts, which fail after `until` [S, A] seconds each.

    Earlier blocks have kept `kept` [S] intervals of work.

    Returns:
      [3, S], what the block adds to seconds, failures and restarting of `SimulatedRuns`; [S], the
      intervals that are kept now; [S], whether the training is complete.
    """
    period = interval + costs.stall
    # An attempt keeps the intervals whose checkpoints were complete when it failed.
    new = np.floor((until - costs.restart - costs.write) / period).clip(0)
    before = kept[:, None] + np.cumsum(new, axis=1) - new
    rest = (work - before * interval).clip(0)
    needed = costs.restart + rest + np.ceil(rest / interval) * costs.stall + costs.write
    ends = until >= needed
    is_done = np.asarray(ends.any(axis=1))
    width = until.shape[1]
    last = np.where(is_done, ends.argmax(axis=1), width)
    failed = np.arange(width) < last[:, None]
    at = np.arange(len(last)), last.clip(max=width - 1)
    end = np.where(is_done, needed[at], 0.0)
    starting = np.minimum(until, costs.restart)
    restarting = (starting * failed).sum(axis=1) + np.where(is_done, costs.restart, 0.0)
    added = np.stack([(until * failed).sum(axis=1) + end, failed.sum(axis=1), restarting])
    return added, before[:, -1] + new[:, -1], is_done


def _widths(costs: Interruptions, work: float, interval: float, runs: int) -> Iterator[int]:
    """Yields the number of attempts of each block: about as many as a run has, then fewer."""
    mean = costs.between_failures
    most = max(1, _BLOCK // runs)
    periods = work / mean * (1 + costs.stall / interval)
    width = int(periods + 4 * periods**0.5) + 4
    while True:
        yield min(width, most)
        width = max(4, width // 2) if width <= most else width


# Below this goodput a training is refused: failures undo nearly all of its work.
_LOWEST_GOODPUT = 0.01
# More failures than these are not simulated: it would take minutes and change nothing.
_MOST_FAILURES = 1e9


def plan_training(plan: Plan, options: JobOptions) -> Goodput:
    """Returns what a training takes that repeats a plan's step, with failures and checkpoints.

    Raises:
      UserError: an option is not a number in its range, or so many chips fail so often that the
        training makes almost no progress; names the option.
    """
    job = make_job(plan, options)
    costs = job.costs
    interval = options.checkpoint_interval or job.best_interval()
    steps = max(1, round(interval / job.step))
    interval = steps * job.step
    expected = formulas.expected_goodput(costs, interval)
    _check(job, interval, expected, options)
    count, seed = options.simulated_runs, options.simulation_seed
    runs = simulate(costs, job.work, interval, count, seed, job.failure_rate.count)
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
        goodput=dataclasses.replace(
            _range(runs.goodput), mean=runs.work * len(runs.seconds) / total
        ),
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
        runs=options.simulated_runs,
        seed=options.simulation_seed,
        assumptions=assumptions(job, options),
        published_rates=[
            _alternative(f"{rate.name}", dataclasses.replace(job, failure_rate=rate), "failures")
            for rate in RATES.values()
        ],
        sensitivities=_sensitivities(job),
        recoveries=_recoveries(plan, options),
        agents=options.agents,
    )


def _range(values: np.ndarray) -> Range:
    low, median, high = (float(value) for value in np.quantile(values, (0.05, 0.5, 0.95)))
    return Range(float(values.mean()), low, median, high)


def _recoveries(plan: Plan, options: JobOptions) -> list[Alternative]:
    """Returns the job without agents and with them. Options that are given hold for both."""
    jobs = [make_job(plan, dataclasses.replace(options, agents=agents)) for agents in (False, True)]
    names = ("restarts by hand, from checkpoints", "agents, and snapshots in memory")
    return [_alternative(name, job, "agents") for name, job in zip(names, jobs, strict=True)]


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
        half = _alternative(f"half the {name}", _scaled(job, field, 0.5), flag)
        twice = _alternative(f"twice the {name}", _scaled(job, field, 2.0), flag)
        groups.append((half, twice))
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


def _check(job: Job, interval: float, goodput: float, options: JobOptions) -> None:
    """Raises UserError if a training makes almost no progress or fails too often to simulate."""
    costs = job.costs
    if goodput < _LOWEST_GOODPUT:
        raise UserError(
            f"`goodput`: {job.topology.chips:,} chips fail every {costs.between_failures:.3g} s on "
            f"average, while a restart takes {costs.restart:.3g} s, a checkpoint {costs.write:.3g} "
            f"s to write and {interval:.3g} s of work lie between two: {goodput:.2%} of the time "
            "would make progress. Expected at least 1%: fewer chips, a higher `failures` "
            "(chip-hours), `checkpoint_rate` or a lower `restart`"
        )
    failures_of_a_run = job.work / goodput / costs.between_failures
    if failures_of_a_run * options.simulated_runs > _MOST_FAILURES:
        raise UserError(
            f"`simulated_runs={options.simulated_runs}` of `tokens={options.tokens:g}` have "
            f"{failures_of_a_run:.3g} failures each; expected at most {_MOST_FAILURES:g} in all "
            "runs: simulate fewer runs, or train on fewer tokens"
        )
