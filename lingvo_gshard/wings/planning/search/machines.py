"""Searches several machines, and orders them by time or by price."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lingvo_gshard.core import SILENT, Params, Progress, UserError
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.search.experiment_search import (
    COST,
    ExperimentSearch,
    SearchOptions,
    search_experiment,
)


def search_machines(
    experiment: Params,
    machines: Sequence[Topology],
    options: SearchOptions,
    progress: Progress = SILENT,
    partitioner: str | None = None,
    compile_options: Sequence[str] = (),
) -> list[ExperimentSearch]:
    """Returns a search for each machine, the best first, and last those where nothing fits.

    The arguments have the same meaning as in `search_experiment`.

    Raises:
      UserError: the cheapest machine is searched, and the price of one is not published.
    """
    for machine in machines:
        if options.search_for == COST and machine.chip.price is None:
            raise UserError(
                f"`search_for={COST}`: no price of {machine.chip.name} is published; leave "
                f"{machine.name} out of `topology`"
            )
    found = []
    # A process has as many virtual CPU devices as the first machine needs.
    for machine in sorted(machines, key=lambda machine: -machine.devices):
        if len(machines) > 1:
            progress.say(f"searching {machine.name}")
        found.append(
            search_experiment(experiment, machine, options, progress, partitioner, compile_options)
        )
    return sorted(found, key=lambda search: _rank(search, options.search_for))


def _rank(search: ExperimentSearch, goal: str) -> float:
    best, spent = search.result.best, search.billion_tokens
    if best is None or spent is None:
        return math.inf
    return spent.price or math.inf if goal == COST else best.seconds
