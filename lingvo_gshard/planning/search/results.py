"""What a search found: candidates with the model's figures and the compiler's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from lingvo_gshard.planning.search.candidates import Candidate
from lingvo_gshard.planning.search.costs.cost import Cost


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Figures of a candidate that was compiled: bytes of one device, seconds of a step."""

    fits: bool
    peak: int
    seconds: float


# Raises ValueError with the reason where a candidate cannot be compiled.
CompileCandidate = Callable[[Candidate], Compiled]


@dataclasses.dataclass(frozen=True)
class Row:
    """A candidate. cost: by the model. problem: why it could not be compiled."""

    candidate: Candidate
    cost: Cost
    name: str = ""
    compiled: Compiled | None = None
    problem: str = ""

    @property
    def seconds(self) -> float:
        """The compiler's figure where it was compiled, else the model's."""
        return self.compiled.seconds if self.compiled else self.cost.seconds

    @property
    def peak(self) -> int:
        """The compiler's figure where it was compiled, else the model's."""
        return self.compiled.peak if self.compiled else self.cost.peak


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """best: the fastest that fits, None if none does. rows: all, the fastest by the model first.

    front: of those that count, each that is faster than all that need less memory, fastest first.
    Those that count are the compiled ones, where any were. yardsticks: the named strategies.
    """

    best: Row | None
    front: tuple[Row, ...]
    rows: tuple[Row, ...]
    yardsticks: tuple[Row, ...]
    capacity: int


def front(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Returns the rows that no other one is both faster and smaller than, fastest first."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda r: (r.seconds, r.peak)):
        if not kept or row.peak < kept[-1].peak:
            kept.append(row)
    return tuple(kept)
