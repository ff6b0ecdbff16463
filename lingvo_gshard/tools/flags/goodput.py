"""Flags of gshard-plan --goodput, and what they ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.flags.definitions import Flags, decimal, integer, refuse, string, switch
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan import plan
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.training import formulas, job
from lingvo_gshard.wings.planning.training.budget import laws, search
from lingvo_gshard.wings.planning.training.budget.search import BudgetOptions
from lingvo_gshard.wings.planning.training.job import JobOptions

_BUDGET_FLAGS = ("days", "law", "mfu", "state_bytes")
_NOT_WITH_BUDGET = (
    *("experiment", "config", "plan", "goodput", "generate", "search"),
    *("mesh", "strategy", "html"),
)


def budget_flags() -> Flags:
    """Returns --budget and the flags that only apply to it."""
    return dict(
        budget=decimal(
            "Money in USD: searches model size, experts, tokens (at most --tokens) and machine (of "
            "--topology, else all with a list price) for the lowest loss by a scaling law."
        ),
        days=decimal("Longest training, with --budget.", search.DAYS),
        law=string(f"Scaling law, with --budget: {', '.join(laws.LAWS)}.", BudgetOptions.law),
        mfu=decimal(
            f"MFU of all models, with --budget. Unless given, {search.DENSE_MFU:.2g} for dense "
            f"models and {search.SPARSE_MFU:.2g} for those with experts."
        ),
        state_bytes=decimal(
            "Bytes of weight, gradient and moments for each weight, with --budget.",
            search.STATE_BYTES,
        ),
    )


def check_budget_flags(values: flags.FlagValues) -> None:
    """Raises UserError if flags of --budget are mixed with other plans' flags or out of range."""
    if values.budget is None:
        for name in _BUDGET_FLAGS:
            if values[name].present:
                raise UserError(
                    f"--{name}={values[name].value} applies to --budget, which is not given"
                )
        return
    refuse(values, _NOT_WITH_BUDGET, "does not apply to --budget; give one of them")
    search.check(budget_options(values))


def budget_options(values: flags.FlagValues) -> BudgetOptions:
    """Returns the options that the flags give."""
    fields = [field.name for field in dataclasses.fields(BudgetOptions) if field.name in values]
    given: dict[str, Any] = {
        name: values[name].value for name in fields if values[name].value is not None
    }
    if values.mfu is not None:
        given |= {"dense_mfu": values.mfu, "sparse_mfu": values.mfu}
    return BudgetOptions(**given)


def budget_machines(values: flags.FlagValues) -> list[Topology]:
    """Returns the machines of --topology, or all that have a list price."""
    return search.named_machines(values.topology) if values.topology else search.priced_machines()


_NUMBERS = (
    (
        "checkpoint_rate",
        "Bytes per second that each host writes and reads, with --goodput or --budget; "
        f"{job.HOST_RATE:.3g} unless given.",
    ),
    (
        "checkpoint_stall",
        "Seconds that training waits for a checkpoint, with --goodput. Unless given: copying the "
        f"state to the host at {job.COPY_RATE / 1e9:g} GB/s per device, as saves are asynchronous.",
    ),
    (
        "checkpoint_interval",
        "Seconds of work between two checkpoints, with --goodput; the best unless given.",
    ),
    (
        "restart",
        "Seconds from a failure until processes run again, before they compile and restore, with "
        f"--goodput or --budget; {job.RESTART:g} unless given.",
    ),
    (
        "compile_seconds",
        "Seconds of compiling after a restart, with --goodput; the plan's own unless given.",
    ),
)
_ONLY_HERE = (
    *(name for name, _ in _NUMBERS),
    *("failures", "simulated_runs", "simulation_seed", "plan", "agents"),
)
# These apply to --budget as well.
SHARED = ("failures", "checkpoint_rate", "restart")
_NOT_HERE = ("generate", "search")
# Flags that a plan from a file already answers.
_NOT_WITH_A_FILE = (
    *("experiment", "config", "gin_param", "gin_file", "topology", "mesh", "strategy"),
    *("device_order", "partitioner", "calibration", "remedies"),
)


def goodput_flags() -> Flags:
    """Returns --goodput and the flags that only apply to it."""
    return dict(
        goodput=switch(
            "Plans the whole training of --tokens with failures, checkpoints and restarts: the "
            "best checkpoint interval, goodput, days and price."
        ),
        plan="A plan that --json wrote, with --goodput: in place of --experiment and --topology.",
        agents=switch(
            "With --goodput: gshard-launch starts workers again, from snapshots in memory."
        ),
        failures="How often chips fail, with --goodput or --budget: a published rate "
        f"({', '.join(formulas.RATES)}) or the mean chip-hours between two failures. "
        "Unless given, the rate of similar chips.",
        **{name: decimal(text) for name, text in _NUMBERS},
        simulated_runs=integer("Number of trainings that --goodput simulates.", JobOptions.runs),
        simulation_seed=integer("Seed of the simulation, with --goodput.", 0, 0),
    )


def check_goodput_flags(values: flags.FlagValues) -> None:
    """Raises ValueError if flags are missing, mixed with other plans', or not in their range."""
    if not values.goodput:
        for name in _ONLY_HERE:
            if values[name].present and not (values.budget is not None and name in SHARED):
                raise UserError(
                    f"--{name}={values[name].value} applies to --goodput, which is not given"
                )
        return
    refuse(values, _NOT_HERE, "does not apply to --goodput; give one of them")
    if values.plan:
        why = f"does not apply to --plan={values.plan}; give one of them"
        refuse(values, _NOT_WITH_A_FILE, why)
    if values.tokens is None:
        raise UserError("--goodput needs --tokens, the tokens to train on, such as 1e12")
    job.check(job_options(values))


def planned_before(values: flags.FlagValues) -> Plan | None:
    """Returns the plan in the file --plan; None if the flag is not given.

    Raises:
      UserError: the file is missing or is no plan.
    """
    return plan.load(values.plan) if values.plan else None


def job_options(values: flags.FlagValues) -> JobOptions:
    """Returns the options that the flags give."""
    return JobOptions(
        tokens=values.tokens,
        failures=values.failures,
        runs=values.simulated_runs,
        seed=values.simulation_seed,
        agents=values.agents,
        **{name: values[name].value for name, _ in _NUMBERS},
    )
