"""Explains a choice: what a step would cost with the next best value of each choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lingvo_gshard.wings.planning.plan.plan import Record
from lingvo_gshard.wings.planning.search.choices import Candidate
from lingvo_gshard.wings.planning.search.results import RatedCandidate, SearchResult

_KEPT = "the experiment's"


class Alternative(Record, frozen=True, kw_only=True):
    """The fastest candidate that differs from the best one in a choice. Other choices may differ.

    Attributes:
      choice: what is chosen, such as "micro_batches".
      ratio: `seconds` over the best candidate's seconds, both by the same source.
      more_bytes: `peak` minus the best candidate's peak.
      is_compiled: whether the figures are compiled ones. Else both sides are the cost model's.
      problem: the compiler's reason to refuse the candidate; empty if there is none.
    """

    choice: str
    chosen: str
    value: str
    seconds: float
    ratio: float
    peak: int
    more_bytes: int
    fits: bool
    is_compiled: bool
    problem: str = ""


def _sharding(candidate: Candidate) -> str:
    overrides = "".join(f"; {pattern}: {table}" for pattern, table in candidate.overrides)
    return f"{candidate.mesh} {candidate.strategy}{overrides}"


# The value of each choice, in words.
_CHOICES: dict[str, Callable[[Candidate], str]] = {
    "sharding": _sharding,
    "rematerialize": lambda candidate: candidate.rematerialize,
    "offload_moments": lambda candidate: "yes" if candidate.offload_moments else "no",
    "micro_batches": lambda candidate: str(candidate.micro_batches or _KEPT),
    "precision": lambda candidate: candidate.precision or _KEPT,
    "interleaved": lambda candidate: str(candidate.interleaved or _KEPT),
    "dispatch": lambda candidate: candidate.dispatch or _KEPT,
    "compile_options": lambda candidate: ", ".join(candidate.compile_options) or _KEPT,
}


def explain(result: SearchResult) -> list[Alternative]:
    """Returns the alternatives to each choice of the best candidate, the fastest first.

    Of the many shardings only the next best one and the best named strategy are returned. There is
    nothing to return for a choice with one value, and if no candidate fits.
    """
    if result.best is None:
        return []
    found = []
    for choice, value_of in _CHOICES.items():
        others = _others(result, value_of)
        count = 1 if choice == "sharding" else len(others)
        found += [_alternative(choice, row, result) for row in others[:count]]
        named = [row for row in result.baselines if result.fits(row) and row != result.best]
        if choice == "sharding" and named:
            found.append(_alternative(choice, min(named, key=result.preference), result))
    return found + list(_exchanges(result.best))


def _exchanges(best: RatedCandidate) -> Iterator[Alternative]:
    """Yields the same candidate with the other exchanges of its experts' rows."""
    chosen, seconds = best.candidate.exchange, best.cost.exchanges
    for name in sorted(seconds, key=seconds.__getitem__):
        if name != chosen:
            whole = best.cost.seconds - seconds[chosen] + seconds[name]
            yield Alternative(
                choice="exchange",
                chosen=chosen,
                value=name,
                seconds=whole,
                ratio=whole / best.cost.seconds,
                peak=best.cost.peak,
                more_bytes=0,
                fits=True,
                is_compiled=False,
            )


def _others(result: SearchResult, value_of: Callable[[Candidate], str]) -> list[RatedCandidate]:
    """Returns the best candidate for each value that was not chosen, in order of preference."""
    assert result.best is not None
    by_value: dict[str, RatedCandidate] = {}
    for row in sorted(result.rows, key=result.preference):
        by_value.setdefault(value_of(row.candidate), row)
    by_value.pop(value_of(result.best.candidate), None)
    return list(by_value.values())


def _alternative(choice: str, row: RatedCandidate, result: SearchResult) -> Alternative:
    """Returns a candidate beside the best one."""
    assert result.best is not None
    value_of, best = _CHOICES[choice], result.best
    is_compiled = row.compiled is not None and best.compiled is not None
    one, other = (row, best) if is_compiled else (row.cost, best.cost)
    return Alternative(
        choice=choice,
        chosen=value_of(best.candidate),
        value=f"{row.candidate.mesh} {row.name}" if row.name else value_of(row.candidate),
        seconds=one.seconds,
        ratio=one.seconds / other.seconds if other.seconds else 1.0,
        peak=one.peak,
        more_bytes=one.peak - other.peak,
        fits=result.fits(row),
        is_compiled=is_compiled,
        problem=row.problem,
    )
