"""SearchRecord: the result of a search, as data for reports and trainings."""

from __future__ import annotations

from lingvo_gshard.wings.planning.plan.plan import Plan, Record
from lingvo_gshard.wings.planning.roofline import Budget
from lingvo_gshard.wings.planning.search.choices import Candidate
from lingvo_gshard.wings.planning.search.explanation import Alternative
from lingvo_gshard.wings.planning.search.results import CompiledCost

FORMAT = 1


class CostRecord(Record, frozen=True, kw_only=True):
    """The cost model's estimate for a candidate."""

    seconds: float
    peak: int


class CandidateRecord(Candidate, frozen=True, kw_only=True):
    """A candidate with its costs and the flags that select it; see `RatedCandidate`."""

    name: str
    flags: list[str]
    model: CostRecord
    compiled: CompiledCost | None
    problem: str


class MachineRecord(Record, frozen=True, kw_only=True):
    """The best candidate of a machine. If none fits, `mesh` is empty and the numbers are None."""

    topology: str
    mesh: str
    strategy: str
    seconds: float | None
    billion_tokens: Budget | None


class SearchRecord(Record, frozen=True, kw_only=True):
    """The result of a search. `SearchResult` explains the other fields.

    Attributes:
      explanation: what the step would cost with other values of each choice.
      billion_tokens: time and price of training on a billion tokens; None if none fits.
      machines: the machines that were searched, the best first.
      plan: plan of the best candidate; None if it was not compiled.
      params: the experiment's Params with all choices of the best candidate, as in a run's
        params.txt; empty if none fits.
    """

    search_format: int = FORMAT
    name: str
    topology: str
    best: CandidateRecord | None
    front: list[CandidateRecord]
    explanation: list[Alternative]
    candidates: list[CandidateRecord]
    baselines: list[CandidateRecord]
    billion_tokens: Budget | None
    machines: list[MachineRecord]
    capacity: int
    plan: Plan | None
    params: str
    seconds_bound: float = 0.0
    notes: list[str] = []
