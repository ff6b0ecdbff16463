"""A training job: a plan's step, repeated on a machine that fails."""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core import Options, UserError, option
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.training import formulas
from lingvo_gshard.wings.planning.training.formulas import FailureRate, Interruptions
from lingvo_gshard.wings.planning.training.goodput_record import Assumption

# Option -> the assumption that it replaces: name, unit, value and source.
_STATED = formulas.FIGURES["job"]
HOST_RATE: float = _STATED["checkpoint_rate"]["value"]
RESTART: float = _STATED["restart"]["value"]
# Assumed, in bytes per second, as the source of `checkpoint_stall` says.
COPY_RATE = 10e9
# Time of a whole compilation by libtpu over the time until code is generated: 6 for a small
# loop of layers, 20 for the paper's model of 600 billion weights. For GPUs 4, with GPT-OSS 120B, to
# 16, with a few products.
_WITH_CODE = 12.0
_HOUR = 3600
_DAY = 24 * _HOUR


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions(Options):
    """Options of a training that a plan does not know. None takes the default."""

    tokens: float
    agents: bool = option(
        False, "With `goodput`: gshard-launch starts workers again, from snapshots in memory."
    )
    failures: str | None = option(
        None,
        "How often chips fail, with `goodput` or `budget`: a published rate "
        f"({', '.join(formulas.RATES)}) or the mean chip-hours between two failures. "
        "Unless given, the rate of similar chips.",
    )
    checkpoint_rate: float | None = option(
        None,
        "Bytes per second that each host writes and reads, with `goodput` or `budget`; "
        f"{HOST_RATE:.3g} unless given.",
        above=0,
    )
    checkpoint_stall: float | None = option(
        None,
        "Seconds that training waits for a checkpoint, with `goodput`. Unless given: copying the "
        f"state to the host at {COPY_RATE / 1e9:g} GB/s per device, as saves are asynchronous.",
        minimum=0,
    )
    checkpoint_interval: float | None = option(
        None,
        "Seconds of work between two checkpoints, with `goodput`; the best unless given.",
        above=0,
    )
    restart: float | None = option(
        None,
        "Seconds from a failure until processes run again, before they compile and restore, with "
        f"`goodput` or `budget`; {RESTART:g} unless given.",
        minimum=0,
    )
    compile_seconds: float | None = option(
        None,
        "Seconds of compiling after a restart, with `goodput`; the plan's own unless given.",
        minimum=0,
    )
    simulated_runs: int = option(
        4000, "Number of trainings that `goodput` simulates.", minimum=1, maximum=1_000_000
    )
    simulation_seed: int = option(0, "Seed of the simulation, with `goodput`.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.failures is not None:
            formulas.get(self.failures)
        if not 0 < self.tokens < math.inf:
            raise UserError(f"`tokens={self.tokens}`: expected more than 0, such as 1e12")


@dataclasses.dataclass(frozen=True)
class Job:
    """All numbers of a training. Times are in seconds.

    Attributes:
      state_bytes: weights and moments of the whole model.
      host_rate: bytes per second that one host writes and reads.
      stall: time that training waits for a checkpoint.
      detect: time from a failure until processes run again.
      compile: time of compiling after a restart.
      restore: time of restoring the state after it; None reads it as fast as it is written.
    """

    topology: Topology
    steps: float
    step: float
    state_bytes: int
    failure_rate: FailureRate
    host_rate: float
    stall: float
    detect: float
    compile: float
    restore: float | None = None

    @property
    def work(self) -> float:
        """The time of all steps."""
        return self.steps * self.step

    @property
    def costs(self) -> Interruptions:
        """The cost of failures and checkpoints."""
        transfer = self.state_bytes / (self.host_rate * self.topology.hosts)
        return Interruptions(
            between_failures=self.failure_rate.chip_hours * _HOUR / self.topology.chips,
            stall=self.stall,
            write=transfer,
            restart=self.detect + self.compile + _or(self.restore, transfer),
        )

    def best_interval(self) -> float:
        """Returns the best interval between checkpoints, in whole steps and within the training."""
        best = formulas.best_interval(self.costs, self.step)
        return min(max(1, round(best / self.step)) * self.step, self.work)

    def days(self, seconds: float) -> float:
        """Returns seconds in days."""
        return seconds / _DAY

    def price(self, seconds: float) -> float | None:
        """Returns the list price of all chips for so many seconds; None if none is published."""
        price = self.topology.chip.price
        return None if price is None else seconds / _HOUR * self.topology.chips * price.amount


def make_job(plan: Plan, options: JobOptions) -> Job:
    """Returns the job that repeats a plan's step; UserError if the plan has no tokens or time."""
    if not plan.tokens_per_step or not plan.seconds_per_step:
        raise UserError(
            f"`goodput`: the plan of {plan.name} has no "
            f"{'time' if plan.tokens_per_step else 'tokens'} of a step; expected the plan of a "
            "training step"
        )
    topology = topologies.get(plan.topology)
    memory = plan.bytes_per_device
    own = memory.weights + memory.moments
    rate = formulas.get(options.failures) if options.failures else formulas.default(topology)
    seconds = plan.compile_seconds * (1.0 if plan.has_code else _WITH_CODE)
    default = {
        flag: stated.get("agents_value" if options.agents else "value", seconds)
        for flag, stated in _STATED.items()
    }
    return Job(
        topology=topology,
        steps=math.ceil(options.tokens / plan.tokens_per_step),
        step=plan.seconds_per_step,
        state_bytes=sum(row.bytes for row in plan.tensors) or own * plan.devices,
        failure_rate=rate,
        host_rate=_or(options.checkpoint_rate, default["checkpoint_rate"]),
        stall=_or(options.checkpoint_stall, own / COPY_RATE),
        detect=_or(options.restart, default["restart"]),
        compile=_or(options.compile_seconds, default["compile_seconds"]),
        # A snapshot is in the memory of the host that restores it.
        restore=own / COPY_RATE if options.agents else None,
    )


def assumptions(job: Job, options: JobOptions) -> list[Assumption]:
    """Returns the numbers of a job that no compiler can tell, each with its option and source."""

    rate = job.failure_rate
    rows = [
        Assumption(
            "between two failures of a chip", rate.chip_hours, "chip-hours", "failures", rate.source
        )
    ]
    for flag, stated in _STATED.items():
        source = stated.get("agents_source" if options.agents else "source", stated["source"])
        source = source if getattr(options, flag) is None else f"`{flag}`"
        value = getattr(job, stated["field"])
        rows.append(Assumption(stated["name"], value, stated["unit"], flag, source))
    return rows


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
