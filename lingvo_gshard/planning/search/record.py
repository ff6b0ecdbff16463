"""The result of a search as data for JSON."""

from __future__ import annotations

from lingvo_gshard.planning.plan.plan import Plan, Record
from lingvo_gshard.planning.search import result as search_result
from lingvo_gshard.planning.search.experiment_search import ExperimentSearch


class CostRecord(Record, frozen=True, kw_only=True):
    """The cost model's estimate for a candidate.

    Attributes:
      seconds: time of one step.
      peak: peak bytes of one device.
    """

    seconds: float
    peak: int


class CandidateRecord(Record, frozen=True, kw_only=True):
    """A candidate with its costs.

    Attributes:
      mesh: axes and sizes.
      strategy: table of letters and axes, or a strategy's name.
      overrides: (pattern of layer paths, table) for layers that are sharded differently.
      rematerialize: rematerialization policy.
      micro_batches: number of micro-batches of a step.
      name: name of the strategy; empty for candidates that the search made.
      flags: command-line flags that select the candidate.
      model: the cost model's estimate.
      compiled: the compiler's figures; None if it was not compiled.
      problem: why it could not be compiled; empty if it could.
    """

    mesh: str
    strategy: str
    overrides: list[tuple[str, str]]
    rematerialize: str
    micro_batches: int
    name: str
    flags: list[str]
    model: CostRecord
    compiled: search_result.CompiledCost | None
    problem: str


class SearchRecord(Record, frozen=True, kw_only=True):
    """The result of a search.

    Attributes:
      best: the fastest candidate that fits; None if none fits.
      front: candidates that no other one beats in both time and memory, fastest first.
      candidates: all candidates that the search made.
      baselines: named strategies, for comparison.
      capacity: bytes of a device that a program may use.
      plan: plan of the best candidate; None if it was not compiled.
    """

    best: CandidateRecord | None
    front: list[CandidateRecord]
    candidates: list[CandidateRecord]
    baselines: list[CandidateRecord]
    capacity: int
    plan: Plan | None


def to_record(search: ExperimentSearch) -> SearchRecord:
    """Returns a search's result as data."""
    result = search.result
    return SearchRecord(
        best=_candidate(search, result.best) if result.best else None,
        front=[_candidate(search, row) for row in result.front],
        candidates=[_candidate(search, row) for row in result.rows],
        baselines=[_candidate(search, row) for row in result.baselines],
        capacity=result.capacity,
        plan=search.plan,
    )


def _candidate(search: ExperimentSearch, row: search_result.RatedCandidate) -> CandidateRecord:
    candidate = row.candidate
    return CandidateRecord(
        mesh=candidate.mesh,
        strategy=candidate.strategy,
        overrides=list(candidate.overrides),
        rematerialize=candidate.rematerialize,
        micro_batches=candidate.micro_batches,
        name=row.name,
        flags=search.flags(row),
        model=CostRecord(seconds=row.cost.seconds, peak=row.cost.peak),
        compiled=row.compiled,
        problem=row.problem,
    )
