"""gshard-plan --search: the flags and the report of a search."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence

import msgspec
from absl import flags

from lingvo_gshard.tools.console import flag_of, in_bytes, in_large, in_seconds, make_table, output
from lingvo_gshard.tools.flags.definitions import Flags, refuse, switch
from lingvo_gshard.tools.flags.options import option_flags
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.search import record
from lingvo_gshard.wings.planning.search.experiment_search import ExperimentSearch, SearchOptions
from lingvo_gshard.wings.planning.search.explanation import Alternative, explain
from lingvo_gshard.wings.planning.search.results import RatedCandidate

_MAX_CANDIDATES = 8
_LONGEST_PROBLEM = 40
# Longer values are cut, and keep so much before their difference. JSON has them in full.
_LONGEST, _CONTEXT = 60, 20


SEARCH_FLAGS: Flags = dict(
    search=switch(
        "Searches for the fastest mesh, strategy, rematerialization, use of host memory, "
        "micro-batches, dispatch and options of the compiler that fit, instead of planning "
        "those of the experiment."
    ),
    **option_flags(SearchOptions()),
)


def check_flags(values: flags.FlagValues) -> None:
    """Raises ValueError naming a flag that sets what the search is to find."""
    why = "does not go with --search"
    refuse(values, ("mesh", "strategy"), f"{why}, which finds meshes and strategies itself")
    rates = "which rates by published efficiencies; plan what it finds with --calibration"
    refuse(values, ("calibration",), f"{why}, {rates}")


def print_search(
    search: ExperimentSearch, console: output.Console, path: str | None = None
) -> None:
    """Prints the Pareto front of time and memory, named strategies, the choice and its reasons.

    `path` is the file that gets the result.
    """
    result = search.result
    for note in result.notes:
        console.say(f"Note: {note}")
    compiled = [row for row in result.rows if row.compiled or row.problem]
    shown = [*result.front, *(row for row in compiled if row not in result.front)]
    _print_rows(console, "fastest for its memory", shown[:_MAX_CANDIDATES])
    _print_rows(console, "named strategies, by the cost model", result.baselines)
    if result.best is None:
        console.print("No candidate fits: use more devices or a smaller batch.")
        return
    _print_explanation(console, explain(result))
    if path:
        console.say("Train with it:")
        console.say(f"  gshard-train --plan={shlex.quote(path)} --logdir=RUN")
    console.say("As flags:" if path else "Use:")
    for setting in search.settings(result.best):
        console.say(f"  {shlex.quote(flag_of(setting))}")


def print_machines(console: output.Console, searches: Sequence[ExperimentSearch]) -> None:
    """Prints the best candidate of each machine."""
    table = make_table("machine", right=("step", "hours of a billion tokens", "price"))
    table.add_column("mesh")
    for row in map(_machine, searches):
        spent = row.billion_tokens
        if row.seconds is None or spent is None:
            table.add_row(row.topology, "nothing fits", "", "", "")
            continue
        hours = spent.chip_hours / topologies.get(row.topology).chips
        is_known = spent.price is not None
        price = f"{in_large(spent.price)} {spent.currency}" if is_known else "not published"
        table.add_row(row.topology, in_seconds(row.seconds), f"{hours:,.3g}", price, row.mesh)
    console.print_table(table)


def _print_explanation(console: output.Console, rows: Sequence[Alternative]) -> None:
    """Prints what the step would cost with the next best value of each choice."""
    table = make_table("choice", "chosen", "instead", right=("time", "peak"))
    table.add_column("by")
    for row in rows:
        figures = ["", "", row.problem.splitlines()[0][:_LONGEST_PROBLEM] if row.problem else ""]
        if not row.problem:
            sign = "-" if row.more_bytes < 0 else "+"
            fits = "" if row.fits else ", does not fit"
            figures = [
                f"{row.ratio - 1:+.1%}",
                f"{sign}{in_bytes(abs(row.more_bytes))}{fits}",
                "compiler" if row.is_compiled else "cost model",
            ]
        choice = row.choice.replace("_", " ")
        table.add_row(choice, *_differing(row.chosen, row.value), *figures)
    console.print_table(table)


def _differing(*texts: str) -> list[str]:
    """Returns texts cut to `_LONGEST`, without a long beginning that they have in common."""
    if max(map(len, texts)) <= _LONGEST:
        return list(texts)
    common = len(os.path.commonprefix(texts))
    start = texts[0].rfind(" ", 0, max(common - _CONTEXT, 0)) + 1
    return [f"{'...' if start else ''}{text[start:]}"[:_LONGEST] for text in texts]


def _print_rows(console: output.Console, title: str, rows: Iterable[RatedCandidate]) -> None:
    table = make_table(title, "rematerialize", right=("model", "", "compiled", ""))
    for row in rows:
        candidate = row.candidate
        what = f"{row.name or candidate.strategy}\n  {candidate.mesh}"
        if candidate.overrides:
            what += f"; {len(candidate.overrides)} overrides"
        compiled = [row.problem.splitlines()[0][:_LONGEST_PROBLEM] if row.problem else "", ""]
        if row.compiled:
            fits = "" if row.compiled.fits else ", does not fit"
            compiled = [in_seconds(row.compiled.seconds), in_bytes(row.compiled.peak) + fits]
        by_model = [in_seconds(row.cost.seconds), in_bytes(row.cost.peak)]
        kept = "\n  moments in host memory" if candidate.offload_moments else ""
        table.add_row(what, candidate.rematerialize + kept, *by_model, *compiled)
    console.print_table(table)


def to_record(searches: Sequence[ExperimentSearch]) -> record.SearchRecord:
    """Returns the result of the first search as data, with a row for the machine of each."""
    search = searches[0]
    result = search.result
    return record.SearchRecord(
        name=search.experiment.name,
        topology=search.topology.name,
        best=_candidate(search, result.best) if result.best else None,
        front=[_candidate(search, row) for row in result.front],
        explanation=explain(result),
        candidates=[_candidate(search, row) for row in result.rows],
        baselines=[_candidate(search, row) for row in result.baselines],
        billion_tokens=search.billion_tokens,
        seconds_bound=result.seconds_bound,
        notes=list(result.notes),
        machines=[_machine(each) for each in searches],
        capacity=result.capacity,
        plan=search.plan,
        params=search.params(result.best).to_text() if result.best else "",
    )


def _machine(search: ExperimentSearch) -> record.MachineRecord:
    best = search.result.best
    return record.MachineRecord(
        topology=search.topology.name,
        mesh=best.candidate.mesh if best else "",
        strategy=best.candidate.strategy if best else "",
        seconds=best.seconds if best else None,
        billion_tokens=search.billion_tokens,
    )


def _candidate(search: ExperimentSearch, row: RatedCandidate) -> record.CandidateRecord:
    return record.CandidateRecord(
        **msgspec.structs.asdict(row.candidate),
        name=row.name,
        flags=[flag_of(setting) for setting in search.settings(row)],
        model=record.CostRecord(seconds=row.cost.seconds, peak=row.cost.peak),
        compiled=row.compiled,
        problem=row.problem,
    )
