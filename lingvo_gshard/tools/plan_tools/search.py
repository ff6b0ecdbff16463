"""gshard-plan --search: which mesh, strategy and rematerialization fit and are fastest."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable

import rich.box
import rich.console
import rich.table
from absl import flags

from lingvo_gshard.planning.plan.plan import Row
from lingvo_gshard.planning.search import results
from lingvo_gshard.planning.search.experiment_search import ExperimentSearch
from lingvo_gshard.tools.console.units import in_bytes, in_seconds

_SHOWN = 8


def define_search_flags(values: flags.FlagValues) -> None:
    """Adds the flags of the search."""
    flags.DEFINE_boolean(
        "search",
        False,
        "Looks for the mesh, strategy and rematerialization that fit and are fastest, in place of "
        "those of the experiment.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "search_compilations",
        4,
        "How many of the best candidates of the search's cost model are compiled to decide; 0 "
        "takes the model's word.",
        0,
        flag_values=values,
    )


def check_flags(values: flags.FlagValues) -> None:
    """Raises ValueError naming a flag that sets what the search is to find."""
    for flag in ("mesh", "strategy"):
        if values[flag].present:
            raise ValueError(f"--{flag} and --search: the search finds the {flag} itself")


def to_json(found: ExperimentSearch) -> Row:
    """Returns best, front, compiled and yardsticks as json.dump takes them."""
    result = found.result
    return {
        "best": _record(found, result.best) if result.best else None,
        "front": [_record(found, row) for row in result.front],
        "candidates": [_record(found, row) for row in result.rows],
        "yardsticks": [_record(found, row) for row in result.yardsticks],
        "capacity": result.capacity,
        "plan": found.plan.to_json() if found.plan else None,
    }


def print_found(found: ExperimentSearch, console: rich.console.Console) -> None:
    """Prints the front of time against memory, named strategies beside, and the best's flags."""
    result = found.result
    decided = [row for row in result.rows if row.compiled or row.problem]
    shown = [*result.front, *(row for row in decided if row not in result.front)]
    _print_rows(console, "fastest for its memory", shown[:_SHOWN])
    _print_rows(console, "for comparison, by the model", result.yardsticks)
    if result.best is None:
        console.print("Nothing that was tried fits: take more devices or a smaller batch.")
        return
    console.print("Use:", markup=False, highlight=False)
    for flag in found.flags(result.best):
        console.print(f"  {shlex.quote(flag)}", markup=False, highlight=False, soft_wrap=True)


def _print_rows(console: rich.console.Console, title: str, rows: Iterable[results.Row]) -> None:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in (title, "rematerialize", "model", "", "compiled", ""):
        table.add_column(column, justify="left" if column in (title, "rematerialize") else "right")
    for row in rows:
        candidate = row.candidate
        what = f"{row.name or candidate.strategy}\n  {candidate.mesh}"
        if candidate.overrides:
            what += f"; {len(candidate.overrides)} layers otherwise"
        compiled = [row.problem.splitlines()[0][:40] if row.problem else "", ""]
        if row.compiled:
            fits = "" if row.compiled.fits else ", does not fit"
            compiled = [in_seconds(row.compiled.seconds), in_bytes(row.compiled.peak) + fits]
        by_model = [in_seconds(row.cost.seconds), in_bytes(row.cost.peak)]
        table.add_row(what, candidate.rematerialize, *by_model, *compiled)
    console.print(table)


def _record(found: ExperimentSearch, row: results.Row) -> Row:
    record = {
        **dataclasses.asdict(row.candidate),
        "name": row.name,
        "flags": found.flags(row),
        "model": {"seconds": row.cost.seconds, "peak": row.cost.peak},
        "compiled": dataclasses.asdict(row.compiled) if row.compiled else None,
        "problem": row.problem,
    }
    return record
