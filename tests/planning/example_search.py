"""Makes the result of a search that compiled nothing."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.planning.search.record import CandidateRecord, CostRecord, SearchRecord


def example_search(params: Params, topology: str) -> SearchRecord:
    """Returns a search with one candidate: the sharding of an experiment's Params."""
    best = CandidateRecord(
        mesh=params.sharding.mesh,
        strategy=params.sharding.strategy,
        overrides=tuple(params.sharding.overrides.items()),
        rematerialize="none",
        micro_batches=1,
        precision="",
        dispatch="",
        compile_options=(),
        name="",
        flags=[f"--mesh={params.sharding.mesh}", f"--strategy={params.sharding.strategy}"],
        model=CostRecord(seconds=0.1, peak=1000),
        compiled=None,
        problem="",
    )
    return SearchRecord(
        name=params.name,
        topology=topology,
        best=best,
        front=[best],
        explanation=[],
        candidates=[best],
        baselines=[],
        billion_tokens=None,
        machines=[],
        capacity=2000,
        plan=None,
        params=params.to_text(),
    )
