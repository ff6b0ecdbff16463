"""Chooses an option for each group of layers by an integer linear program.

    minimize    sum_g seconds[g, o] x[g, o]  +  sum_(g,h),(i,j) pair[g, h, i, j] y[g, h, i, j]
    subject to  sum_o x[g, o] = 1                                        for every group g
                y[g, h, i, j] >= x[g, i] + x[h, j] - 1                   for every pair of groups
                sum_g resident[t, g, o] x[g, o] + w <= capacity          at both times t
                w >= sum_o workspace[g, o] x[g, o]                       for every group g

x is binary. The boundary of an option is the sharding of the tensors that it passes to other
groups, and x[g, i] sums the options of g with boundary i. `pair` is the cost of resharding between
two boundaries; the continuous variable y is 1 if both are chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.lazy import optimize, sparse


@dataclasses.dataclass(frozen=True)
class OptionCost:
    """Cost of one option of a group.

    Attributes:
      resident: bytes in memory at the start and at the end of the backward pass.
      workspace: bytes that the layers need only while they compute.
      boundary: sharding of the tensors that the group passes to others.
    """

    seconds: float
    resident: tuple[int, ...]
    workspace: int
    boundary: Hashable


# Resharding seconds by the indices of two groups, then by their boundaries; 0 if missing.
PairCosts = Mapping[tuple[int, int], Mapping[tuple[Hashable, Hashable], float]]


def pareto_optimal(choices: Sequence[OptionCost]) -> list[int]:
    """Returns the indices of options that no other option with the same boundary dominates.

    The first of several equal options stays, so the optimum does not change.
    """
    indices: list[int] = []
    order = sorted(range(len(choices)), key=lambda i: (choices[i].seconds, choices[i].resident, i))
    for number in order:
        if not any(_is_as_good(choices[k], choices[number]) for k in indices):
            indices.append(number)
    return sorted(indices)


def solve(
    groups: Sequence[Sequence[OptionCost]], pairs: PairCosts, capacity: float
) -> tuple[int, ...] | None:
    """Returns the index of each group's option with the least total seconds; None if none fits."""
    program = _Program(groups, capacity)
    for (source, target), seconds in pairs.items():
        for (boundary, other), cost in seconds.items():
            program.add_pair(source, target, boundary, other, cost)
    return program.solve()


def _is_as_good(option: OptionCost, other: OptionCost) -> bool:
    return (
        option.boundary == other.boundary
        and option.seconds <= other.seconds
        and option.workspace <= other.workspace
        and all(a <= b for a, b in zip(option.resident, other.resident, strict=True))
    )


class _Program:
    """The integer linear program. Seconds and bytes are scaled to about 1."""

    def __init__(self, groups: Sequence[Sequence[OptionCost]], capacity: float):
        self._groups = groups
        self._first = np.cumsum([0, *map(len, groups)])
        self._size = self._first[-1]
        self._workspace = self._size
        largest = max(c.seconds for choices in groups for c in choices)
        self._scale = 1 / largest if largest > 0 else 1.0
        self._costs = [c.seconds * self._scale for choices in groups for c in choices] + [0.0]
        # Coefficients by column, with the lower and the upper limit of their sum.
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self._add_constraints(capacity)

    def _add_constraints(self, capacity: float) -> None:
        for number, choices in enumerate(self._groups):
            columns = range(self._first[number], self._first[number + 1])
            self._rows.append((dict.fromkeys(columns, 1.0), 1, 1))
            rows = {x: -c.workspace / capacity for x, c in zip(columns, choices, strict=True)}
            self._rows.append(({**rows, self._workspace: 1.0}, 0, np.inf))
        flat = [choice for choices in self._groups for choice in choices]
        for time in range(len(flat[0].resident)):
            resident = {x: c.resident[time] / capacity for x, c in enumerate(flat)}
            self._rows.append(({**resident, self._workspace: 1.0}, -np.inf, 1))

    def add_pair(
        self, source: int, target: int, boundary: Hashable, other: Hashable, seconds: float
    ) -> None:
        """Adds the cost of resharding between two groups with these boundaries."""
        left, right = self._of_boundary(source, boundary), self._of_boundary(target, other)
        if left and right and seconds > 0:
            row = dict.fromkeys([*left, *right], -1.0)
            self._rows.append(({**row, len(self._costs): 1.0}, -1, np.inf))
            self._costs.append(seconds * self._scale)

    def solve(self) -> tuple[int, ...] | None:
        """Returns the optimum; None if the program is infeasible."""
        count = len(self._costs)
        limits: Any
        coefficients, *limits = zip(*self._rows, strict=True)
        entries = [(r, c, v) for r, row in enumerate(coefficients) for c, v in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = sparse.csr_array((values, (rows, columns)), shape=(len(self._rows), count))
        # scipy has no types, and a checker takes the bounds' types from their defaults, numbers.
        upper: Any = np.full(count, np.inf)
        upper[: self._size] = 1
        solution = optimize.milp(
            self._costs,
            integrality=np.arange(count) < self._size,
            bounds=optimize.Bounds(0, upper),
            constraints=optimize.LinearConstraint(matrix, *limits),
            options={"mip_rel_gap": 1e-9},
        )
        if solution.x is None:
            return None
        parts = [solution.x[self._first[g] : self._first[g + 1]] for g in range(len(self._groups))]
        return tuple(int(np.argmax(part)) for part in parts)

    def _of_boundary(self, group: int, boundary: Hashable) -> list[int]:
        first = self._first[group]
        return [first + i for i, c in enumerate(self._groups[group]) if c.boundary == boundary]
