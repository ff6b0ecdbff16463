"""Choosing one option for each group of layers: an integer program, solved by HiGHS.

    minimize    sum_g seconds[g, o] x[g, o]  +  sum_(g,h),(i,j) pair[g, h, i, j] y[g, h, i, j]
    subject to  sum_o x[g, o] = 1                                        for every group g
                y[g, h, i, j] >= x[g, of face i] + x[h, of face j] - 1   for every pair of groups
                sum_g held[m, g, o] x[g, o] + w <= capacity              at every moment m
                w >= sum_o working[g, o] x[g, o]                         for every group g

with binary x. An option's face is how it splits what it hands to others; what a change of layout
between two faces costs is `pair`, and y, which may be fractional, is 1 where both are chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from scipy import optimize, sparse


@dataclasses.dataclass(frozen=True)
class Choice:
    """An option of a group: its seconds, bytes held at each moment, working bytes, and face."""

    seconds: float
    held: tuple[int, ...]
    working: int
    face: Hashable


# Seconds between two groups, by their numbers, and then by their faces; what is not there is 0.
Pairs = Mapping[tuple[int, int], Mapping[tuple[Hashable, Hashable], float]]


def undominated(choices: Sequence[Choice]) -> list[int]:
    """Returns the numbers of choices that no other one of the same face is as good as in all.

    Of equal ones the first is kept, so that leaving out the others changes no optimum.
    """
    kept: list[int] = []
    order = sorted(range(len(choices)), key=lambda i: (choices[i].seconds, choices[i].held, i))
    for number in order:
        if not any(_is_as_good(choices[k], choices[number]) for k in kept):
            kept.append(number)
    return sorted(kept)


def choose(
    groups: Sequence[Sequence[Choice]], pairs: Pairs, capacity: float
) -> tuple[int, ...] | None:
    """Returns the number of each group's choice, least in seconds of those that fit, or None."""
    program = _Program(groups, capacity)
    for (source, target), seconds in pairs.items():
        for (face, other), cost in seconds.items():
            program.add_pair(source, target, face, other, cost)
    return program.solve()


def _is_as_good(one: Choice, other: Choice) -> bool:
    return (
        one.face == other.face
        and one.seconds <= other.seconds
        and one.working <= other.working
        and all(a <= b for a, b in zip(one.held, other.held, strict=True))
    )


class _Program:
    """The integer program; seconds and bytes are scaled to about 1."""

    def __init__(self, groups: Sequence[Sequence[Choice]], capacity: float):
        self._groups = groups
        self._first = np.cumsum([0, *map(len, groups)])
        self._size = self._first[-1]
        self._working = self._size
        largest = max(c.seconds for choices in groups for c in choices)
        self._scale = 1 / largest if largest > 0 else 1.0
        self._costs = [c.seconds * self._scale for choices in groups for c in choices] + [0.0]
        self._rows: list[dict[int, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._add_constraints(capacity)

    def _add_constraints(self, capacity: float) -> None:
        for number, choices in enumerate(self._groups):
            columns = range(self._first[number], self._first[number + 1])
            self._add(dict.fromkeys(columns, 1.0), 1, 1)
            rows = {x: -c.working / capacity for x, c in zip(columns, choices, strict=True)}
            self._add({**rows, self._working: 1.0}, 0, np.inf)
        flat = [choice for choices in self._groups for choice in choices]
        for moment in range(len(flat[0].held)):
            held = {x: c.held[moment] / capacity for x, c in enumerate(flat)}
            self._add({**held, self._working: 1.0}, -np.inf, 1)

    def add_pair(
        self, source: int, target: int, face: Hashable, other: Hashable, seconds: float
    ) -> None:
        """Adds what it costs that two groups have these faces."""
        left, right = self._of_face(source, face), self._of_face(target, other)
        if not (left and right and seconds > 0):
            return
        self._costs.append(seconds * self._scale)
        row = dict.fromkeys([*left, *right], -1.0)
        self._add({**row, len(self._costs) - 1: 1.0}, -1, np.inf)

    def solve(self) -> tuple[int, ...] | None:
        """Returns the optimum, or None if nothing fits."""
        count = len(self._costs)
        entries = [(r, c, v) for r, row in enumerate(self._rows) for c, v in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = sparse.csr_array((values, (rows, columns)), shape=(len(self._rows), count))
        upper = np.full(count, np.inf)
        upper[: self._size] = 1
        found = optimize.milp(
            self._costs,
            integrality=np.arange(count) < self._size,
            bounds=optimize.Bounds(0, upper),
            constraints=optimize.LinearConstraint(matrix, self._lower, self._upper),
            options={"mip_rel_gap": 1e-9},
        )
        if found.x is None:
            return None
        parts = [found.x[self._first[g] : self._first[g + 1]] for g in range(len(self._groups))]
        return tuple(int(np.argmax(part)) for part in parts)

    def _of_face(self, group: int, face: Hashable) -> list[int]:
        first = self._first[group]
        return [first + i for i, c in enumerate(self._groups[group]) if c.face == face]

    def _add(self, row: dict[int, float], lower: float, upper: float) -> None:
        self._rows.append(row)
        self._lower.append(lower)
        self._upper.append(upper)
