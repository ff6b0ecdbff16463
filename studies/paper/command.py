"""Compares plans of the GShard paper's experiments with the published figures.

    python -m studies paper
    python -m studies paper --rows=weights,steps_estimate --json=paper.json

plans the paper's experiments on the paper's machines, 12 compilations, and prints each published
figure beside ours. --rows selects figures; only the plans that they need are compiled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

import rich.box
import rich.console
import rich.progress
import rich.table
from absl import flags

from lingvo_gshard.api import tables
from lingvo_gshard.core.progress import SilentProgress, duration
from lingvo_gshard.tools.console import output, units
from lingvo_gshard.tools.flags import program
from lingvo_gshard.tools.flags.definitions import define
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.wings.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.plan.plan import Plan
from studies.paper import planned_comparisons
from studies.paper import rows as paper_rows
from studies.paper.comparison import Case, ComparisonRow
from studies.paper.planned_comparisons import PaperReport

_VERDICTS = {True: "yes", False: "[bold red]no[/]", None: "not planned"}


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    flags.DEFINE_list(
        "rows",
        [],
        "Figures to compare, separated by commas: names (weights.moe_512e_12l), quantities "
        "(weights) or models (moe_512e_12l).",
        flag_values=values,
    )
    define(
        values,
        **option_flags(PlanOptions(), ["partitioner", "device_order"]),
        **program.COMPILING_FLAGS,
        json=output.json_flag("the comparison and a summary of each plan"),
    )
    return values


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the comparison and returns the exit code: 1 if a plan could not be made.

    Raises:
      UserError: a row is unknown.
    """
    options = read_options(values, PlanOptions)
    with program.using_flags(values, console):
        report = compare(values.rows, options, console)
    print_report(report, console)
    output.write_json(values.json, report)
    # A row outside its limits is not an error.
    return int(any(row.within is None for row in report.rows))


def compare(
    chosen: Sequence[str],
    options: PlanOptions,
    console: rich.console.Console,
) -> PaperReport:
    """Returns the comparison with the paper and shows its progress.

    Raises:
      UserError: names the rows if one is unknown.
    """
    cases = paper_rows.cases_of(paper_rows.select(chosen))
    with _Progress(console, len(cases)) as progress:

        def plan_case(case: Case) -> Plan:
            progress.begin_case(case)
            try:
                params = planned_comparisons.case_params(case)
                topology = topologies.get(case.topology)
                return plan_experiment(params, topology, options, progress)
            finally:
                progress.end_case()

        return planned_comparisons.make_report(chosen, plan_case)


def print_report(report: PaperReport, console: rich.console.Console) -> None:
    """Prints the table, the explanations, and the figures that are not compared."""
    table = _table()
    for row in report.rows:
        figures = (units.digits(value) for value in (row.published, row.ours, row.ratio))
        table.add_row(row.what, *figures, row.limits, _VERDICTS[row.within])
    tables.print_table(console, table)
    as_expected = sum(row.within is True for row in report.rows)
    _say(console, f"{as_expected} of {len(report.rows)} are as expected.")
    _print_explanations(report.rows, console)
    _say(console, "\nNot compared:")
    for what, reason in report.left_out.items():
        _say(console, f"- {what}: {reason}.")
    if any(plan.compiler != "tpu" for plan in report.plans.values()):
        _say(console, "\nCompiled for CPU devices: memory and communication are estimates.")


def _print_explanations(rows: Sequence[ComparisonRow], console: rich.console.Console) -> None:
    """Prints each explanation once, below the names of its rows."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.explanation:
            names.setdefault(row.explanation, []).append(f"{row.what} ({row.place})")
    for explanation, titles in names.items():
        _say(console, "")
        for title in titles:
            _say(console, title, style="bold")
        _say(console, f"  {explanation}")


def _table() -> rich.table.Table:
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    table.add_column("figure", overflow="fold")
    for head in ("published", "ours", "ratio"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("expected", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table


def _say(console: rich.console.Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class _Progress(SilentProgress):
    """Shows the current plan and the time left: a bar on a terminal, else a line for each plan."""

    def __init__(self, console: rich.console.Console, total: int):
        self._console, self._total, self._done = console, total, 0
        self._started = time.monotonic()
        self._current = ""
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

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin_case(self, case: Case) -> None:
        """Shows that the plan of a case begins."""
        self._current = f"{case.name} on {case.topology}{self._time_left()}"
        if self._bar is None:
            _say(self._console, f"Plan {self._done + 1} of {self._total}: {self._current}")

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        """Shows the current stage of the plan on a terminal."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._current}: {stage}")

    def end_case(self) -> None:
        """Shows that the plan is finished."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def _time_left(self) -> str:
        if not self._done:
            return ""
        seconds = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        return f", about {duration(seconds)} left"
