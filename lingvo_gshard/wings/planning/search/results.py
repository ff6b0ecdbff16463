"""SearchResult: candidates with their costs, by the cost model and by compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from lingvo_gshard.wings.planning.search.choices import Candidate
from lingvo_gshard.wings.planning.search.costs import Cost


@dataclasses.dataclass(frozen=True)
class CompiledCost:
    """The cost of a compiled candidate: its fit, peak bytes per device and estimated step time."""

    fits: bool
    peak: int
    seconds: float


# Compiles a candidate. Raises ValueError with the reason if that is impossible.
CompileCandidate = Callable[[Candidate], CompiledCost]


@dataclasses.dataclass(frozen=True)
class RatedCandidate:
    """A candidate with its costs.

    Attributes:
      name: name of the strategy; empty for candidates that the search made.
      compiled: cost by compilation; None if it was not compiled.
      problem: why it could not be compiled; empty if it could.
    """

    candidate: Candidate
    cost: Cost
    name: str = ""
    compiled: CompiledCost | None = None
    problem: str = ""

    @property
    def seconds(self) -> float:
        """Returns the time of a step: the compiled step's, or else the cost model's estimate."""
        return self.compiled.seconds if self.compiled else self.cost.seconds

    @property
    def peak(self) -> int:
        """Returns the peak bytes: the compiled step's, or else the cost model's estimate."""
        return self.compiled.peak if self.compiled else self.cost.peak


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
      best: the fastest candidate that fits; None if none fits.
      front: Pareto front of time and memory, fastest first. If any candidate was compiled, only
        compiled candidates are on it.
      rows: all candidates, fastest by the cost model first.
      baselines: named strategies, for comparison.
      seconds_bound: the products of the model at the chip's peak.
    """

    best: RatedCandidate | None
    front: tuple[RatedCandidate, ...]
    rows: tuple[RatedCandidate, ...]
    baselines: tuple[RatedCandidate, ...]
    capacity: int
    seconds_bound: float = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the choice: the exchange of experts, and errors of the cost model."""
        uncompiled = (row for row in (*self.rows, *self.baselines) if row.compiled is None)
        problems = {row.problem for row in uncompiled if "cost model" in row.problem}
        exchanges = self.best.cost.exchanges if self.best else {}
        found = [f"candidates are left out: {each}" for each in sorted(problems)]
        if self.best and len(exchanges) > 1:
            by_time = sorted(exchanges.items(), key=lambda pair: pair[1])
            times = ", ".join(f"{name} {1e3 * seconds:.4g} ms" for name, seconds in by_time)
            found.append(
                f"the experts' rows travel by the exchange `{self.best.candidate.exchange}`. Of a "
                f"step, by the cost model and hidden behind nothing: {times}"
            )
        return tuple(found)

    def fits(self, row: RatedCandidate) -> bool:
        """Returns whether a candidate fits, by the compiler or else by the cost model."""
        return row.compiled.fits if row.compiled else row.cost.peak <= self.capacity

    def preference(self, row: RatedCandidate) -> tuple:
        """Returns a key that sorts compiled candidates first, then those that fit, then by time."""
        return bool(row.problem), row.compiled is None, not self.fits(row), row.seconds


def front(rows: Iterable[RatedCandidate]) -> tuple[RatedCandidate, ...]:
    """Returns the Pareto front of time and memory, fastest first."""
    pareto: list[RatedCandidate] = []
    for row in sorted(rows, key=lambda r: (r.seconds, r.peak)):
        if not pareto or row.peak < pareto[-1].peak:
            pareto.append(row)
    return tuple(pareto)
