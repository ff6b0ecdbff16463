"""gshard-plan --paper: plans of the GShard paper's experiments beside its published figures."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import rich.box
import rich.console
import rich.progress
import rich.table
from absl import flags

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.planning.experiments import PlanExperiment, PlanOptions
from lingvo_gshard.planning.machines import topologies
from lingvo_gshard.planning.paper import comparison as paper
from lingvo_gshard.planning.paper import rows as paper_rows
from lingvo_gshard.planning.paper.comparison import Case, Comparison
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.planning.progress import Progress
from lingvo_gshard.tools.console import units
from lingvo_gshard.training.monitoring.progress import BarOnTerminal, duration

FORMAT = 1
Record = dict[str, Any]

# The experiments, their machines and how they are split are the paper's.
_FLAGS = ("paper", "paper_rows", "json", "partitioner", "device_order")
_VERDICTS = {True: "yes", False: "[bold red]no[/]", None: "not planned"}
_SHOWN = ("experiment", "topology", "settings")
_KEPT = (
    "devices",
    "compiler",
    "fits",
    "bytes_per_device",
    "parameters",
    "flops",
    "seconds_per_step",
    "steps_per_second",
    "steps_per_second_bound",
    "tokens_per_step",
    "mfu",
    "compile_seconds",
    "versions",
    "notes",
)


def define_paper_flags(values: flags.FlagValues) -> None:
    """Adds the flags of the comparison with the paper."""
    flags.DEFINE_boolean(
        "paper",
        False,
        "Plans the GShard paper's experiments, each on the paper's own cores, and prints the "
        "published figures beside those of the plans: 12 compilations.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "paper_rows",
        [],
        "Of --paper only these rows, by name (weights.moe_512e_12l), quantity (weights) or "
        "model (moe_512e_12l), with commas between; what they do not need is not compiled.",
        flag_values=values,
    )


def check_flags(values: flags.FlagValues) -> None:
    """Raises ValueError for flags that do not go with --paper."""
    for name in values:
        if values[name].present and name not in _FLAGS:
            raise ValueError(
                f"--paper plans the paper's own experiments on its own cores: leave --{name} out; "
                f"it goes with --{', --'.join(_FLAGS[1:])}"
            )


def compare(
    chosen: Sequence[str],
    options: PlanOptions,
    plan_experiment: PlanExperiment,
    console: rich.console.Console,
) -> Record:
    """Returns the comparison as data; a plan that cannot be made is told in the rows it leaves out.

    Raises ValueError for unknown rows.
    """
    comparisons = paper_rows.select(chosen)

    def plan(case: Case, progress: Progress) -> Plan:
        return plan_experiment(_params(case), topologies.get(case.topology), options, progress)

    plans, refusals = _plan_all(paper_rows.cases_of(comparisons), plan, console)
    return {
        "format": FORMAT,
        "rows": [_row(comparison, plans, refusals) for comparison in comparisons],
        "plans": {name: _summary(paper_rows.CASES[name], plan) for name, plan in plans.items()},
        "left_out": dict(paper_rows.LEFT_OUT),
    }


def print_comparison(record: Record, console: rich.console.Console) -> None:
    """Prints the table, an explanation below each row that has one, and what is left out."""
    table = _table()
    for row in record["rows"]:
        table.add_row(
            row["what"],
            *(units.digits(row[name]) for name in ("published", "ours", "ratio")),
            row["limits"],
            _VERDICTS[row["within"]],
        )
    console.print(table, highlight=False)
    held = sum(row["within"] is True for row in record["rows"])
    _say(console, f"{held} of {len(record['rows'])} are as expected.")
    _print_explanations(record["rows"], console)
    _say(console, "\nNot compared:")
    for what, reason in record["left_out"].items():
        _say(console, f"- {what}: {reason}.")
    if any(plan["compiler"] != "tpu" for plan in record["plans"].values()):
        _say(console, "\nCompiled for CPU devices: memory and communication are estimates.")


def exit_code(record: Record) -> int:
    """Returns 1 if a plan could not be made; a row that is off is a finding, not a failure."""
    return int(any(row["within"] is None for row in record["rows"]))


def _params(case: Case) -> Params:
    params = registry.get(case.experiment)
    for path, value in case.settings.items():
        params.set_path(path, value)
    return params


def _plan_all(
    cases: Sequence[Case], plan: Callable[[Case, Progress], Plan], console: rich.console.Console
) -> tuple[dict[str, Record], dict[str, str]]:
    """Plans of cases by name, and why others could not be planned."""
    plans: dict[str, Record] = {}
    refusals: dict[str, str] = {}
    with _Progress(console, len(cases)) as progress:
        for case in cases:
            progress.begin(case)
            try:
                plans[case.name] = plan(case, progress.stage).to_json()
            except ValueError as error:
                refusals[case.name] = str(error)
            # What jax keeps of one program is as large as what it takes to plan the next.
            jax.clear_caches()
            gc.collect()
            progress.end()
    return plans, refusals


def _row(comparison: Comparison, plans: dict[str, Record], refusals: dict[str, str]) -> Record:
    reasons = [refusals[name] for name in comparison.cases if name in refusals]
    if reasons:
        return paper.not_compared(comparison, " ".join(reasons))
    return paper.compare(comparison, plans)


def _summary(case: Case, plan: Record) -> Record:
    about = {name: getattr(case, name) for name in _SHOWN}
    return {**about, **{name: plan[name] for name in _KEPT}}


def _print_explanations(rows: Sequence[Record], console: rich.console.Console) -> None:
    """Each explanation once, below what it is of."""
    of: dict[str, list[str]] = {}
    for row in rows:
        if row["explanation"]:
            of.setdefault(row["explanation"], []).append(f"{row['what']} ({row['place']})")
    for explanation, whats in of.items():
        _say(console, "")
        for what in whats:
            _say(console, what, style="bold")
        _say(console, f"  {explanation}")


def _table() -> rich.table.Table:
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    table.add_column("the paper's figures beside ours", overflow="fold")
    for head in ("published", "ours", "ratio"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("expected", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table


def _say(console: rich.console.Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class _Progress(BarOnTerminal):
    """Shows what is compiled and the time left: a bar on a terminal, a line each elsewhere."""

    def __init__(self, console: rich.console.Console, total: int):
        self._console, self._total, self._done = console, total, 0
        self._started = time.monotonic()
        self._what = ""
        self._bar = None
        if console.is_terminal:
            columns = (
                rich.progress.TextColumn("{task.completed}/{task.total} plans"),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.TimeElapsedColumn(),
            )
            self._bar = rich.progress.Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=total)

    def begin(self, case: Case) -> None:
        """Shows that a plan is begun."""
        self._what = f"{case.name} on {case.topology}{self._left()}"
        if self._bar is None:
            _say(self._console, f"Plan {self._done + 1} of {self._total}: {self._what}")

    def stage(self, stage: str) -> None:
        """Shows what is done for it; nothing but on a terminal."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._what}: {stage}")

    def end(self) -> None:
        """Shows that it is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def _left(self) -> str:
        if not self._done:
            return ""
        seconds = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        return f", about {duration(seconds)} left"
