"""Searches all meshes and rematerialization policies, and compiles the best candidates.

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
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import optimize, sparse
from lingvo_gshard.core.letters import ROWS
from lingvo_gshard.core.progress import SILENT, Progress
from lingvo_gshard.planning.search.candidates import (
    AxisRole,
    Candidate,
    LayerGroups,
    ShardingOption,
    TracedStep,
    candidate,
    group,
    sharding_options,
)
from lingvo_gshard.planning.search.cost_model import CostModel
from lingvo_gshard.planning.search.costs import Cost, Rates
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class OptionCost:
    """Cost of one option of a group.

    Attributes:
      seconds: time of the group's layers in a step.
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
    """Returns the index of each group's option with the least total seconds; None if none fits.

    Args:
      groups: the options of each group.
      pairs: resharding seconds between groups.
      capacity: bytes of a device.
    """
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
        self._rows: list[dict[int, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._add_constraints(capacity)

    def _add_constraints(self, capacity: float) -> None:
        for number, choices in enumerate(self._groups):
            columns = range(self._first[number], self._first[number + 1])
            self._add(dict.fromkeys(columns, 1.0), 1, 1)
            rows = {x: -c.workspace / capacity for x, c in zip(columns, choices, strict=True)}
            self._add({**rows, self._workspace: 1.0}, 0, np.inf)
        flat = [choice for choices in self._groups for choice in choices]
        for time in range(len(flat[0].resident)):
            resident = {x: c.resident[time] / capacity for x, c in enumerate(flat)}
            self._add({**resident, self._workspace: 1.0}, -np.inf, 1)

    def add_pair(
        self, source: int, target: int, boundary: Hashable, other: Hashable, seconds: float
    ) -> None:
        """Adds the cost of resharding between two groups with these boundaries."""
        left, right = self._of_boundary(source, boundary), self._of_boundary(target, other)
        if not (left and right and seconds > 0):
            return
        self._costs.append(seconds * self._scale)
        row = dict.fromkeys([*left, *right], -1.0)
        self._add({**row, len(self._costs) - 1: 1.0}, -1, np.inf)

    def solve(self) -> tuple[int, ...] | None:
        """Returns the optimum; None if the program is infeasible."""
        count = len(self._costs)
        entries = [(r, c, v) for r, row in enumerate(self._rows) for c, v in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = sparse.csr_array((values, (rows, columns)), shape=(len(self._rows), count))
        # scipy has no types, and a checker takes the bounds' types from their defaults, numbers.
        upper: Any = np.full(count, np.inf)
        upper[: self._size] = 1
        limits: Any = self._lower, self._upper
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

    def _add(self, row: dict[int, float], lower: float, upper: float) -> None:
        self._rows.append(row)
        self._lower.append(lower)
        self._upper.append(upper)


_LETTERS = "abc"


def mesh_shapes(
    devices: int, torus: tuple[int, ...] = (), most_axes: int = 3
) -> list[tuple[int, ...]]:
    """Returns mesh shapes of up to `most_axes` axes, fewest axes first.

    Three axes are listed only in descending order of size: the sharding options already permute
    their use, and the devices of the last axis are neighbors, so it is best the smallest.

    Args:
      devices: number of devices, the product of every shape.
      torus: shape of the interconnect. Axes then align with its dimensions.
      most_axes: maximum number of axes.
    """
    shapes: list[tuple[int, ...]] = []
    for axes in range(1, most_axes + 1):
        for sizes in _factorizations(devices, axes):
            is_ordered = axes < 3 or list(sizes) == sorted(sizes, reverse=True)
            if is_ordered and _follows(sizes, torus):
                shapes.append(sizes)
    return shapes


def unnamed_mesh(sizes: tuple[int, ...]) -> Mesh:
    """Returns a mesh of these sizes with placeholder names."""
    return Mesh(tuple(zip(_LETTERS, sizes, strict=False)))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields all ordered products of `count` factors larger than 1 that equal a number."""
    if count == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, count - 1):
                yield (first, *rest)


def _follows(sizes: tuple[int, ...], torus: tuple[int, ...]) -> bool:
    """Returns whether every axis divides a dimension of the torus or spans whole dimensions."""
    if math.prod(torus) != math.prod(sizes):
        return True
    ends = [math.prod(torus[i:]) for i in range(len(torus))]
    starts = [math.prod(sizes[i:]) for i in range(len(sizes))]
    return all(a % b == 0 or b % a == 0 for a in ends for b in starts)


# Shares of the device's memory that the cost model may fill. The first share leaves room for
# elementwise operations, which the model ignores. The other shares give the rest of the Pareto
# front.
_SHARES = (0.9, 0.65, 0.45, 0.3, 0.2)
# Candidates whose times differ by less than this ratio count as equally fast, since the cost model
# is not more accurate. The simpler candidate is then preferred.
_CLOSE = 1.03
# Of two candidates whose times and bytes differ by less than this ratio, only one is compiled.
_SAME = 1.01
# Named strategies that the cost model cannot rate: it knows neither sharded positions nor stages.
_UNRATED = ("folded", "sequence", "context", "pipeline")


def search(
    step: TracedStep,
    devices: int,
    rates: Rates,
    compile_candidate: CompileCandidate | None = None,
    compile_best: int = 4,
    policies: Sequence[str] = tuple(remat_policy.POLICIES),
    torus: tuple[int, ...] = (),
    most_axes: int = 3,
    progress: Progress = SILENT,
) -> SearchResult:
    """Returns the fastest ways to run a traced step that fit in memory.

    Args:
      step: the traced step.
      devices: number of devices.
      rates: speed of the devices.
      compile_candidate: compiles the best candidates to decide among them. None decides by the cost
        model alone.
      compile_best: number of candidates to compile. If one needs more memory than the model
        estimated, the next ones are chosen smaller.
      policies: rematerialization policies to try.
      torus: shape of the interconnect in devices; empty if it is no torus.
      most_axes: maximum number of mesh axes.
      progress: is told each event of the search.
    """
    layer_groups = group(step)
    mesh_searches = [
        _MeshSearch(step, layer_groups, unnamed_mesh(sizes), rates)
        for sizes in mesh_shapes(devices, torus, most_axes) or [(devices,)]
    ]
    rows: dict[Candidate, RatedCandidate] = {}
    for mesh_search in mesh_searches:
        for row in mesh_search.rows(policies):
            rows.setdefault(row.candidate, row)
        progress.say(f"{len(rows)} candidates, up to meshes of {mesh_search.shape}")
    if not rows:
        progress.say("no candidate fits by the cost model; looking for the smallest")
        for mesh_search in mesh_searches:
            rows.update({row.candidate: row for row in mesh_search.smallest(policies)})
    ordered = _simplest_first(rows.values())
    capacity = rates.capacity
    if compile_candidate is not None:
        ordered = _compile(ordered, compile_candidate, compile_best, capacity, progress)
    considered = [row for row in ordered if row.compiled] if compile_candidate else ordered
    fitting = [row for row in considered if _fits(row, capacity)]
    if compile_candidate is not None:
        fitting.sort(key=lambda row: row.seconds)
    best = fitting[0] if fitting else None
    baselines = tuple(_baselines(step, layer_groups, devices, rates))
    return SearchResult(best, front(considered), tuple(ordered), baselines, capacity)


class _MeshSearch:
    """The search on one mesh: the options of each group and their costs."""

    def __init__(self, step: TracedStep, layer_groups: LayerGroups, mesh: Mesh, rates: Rates):
        self._layer_groups, self._mesh = layer_groups, mesh
        self._paths = [spec.path.rpartition(".")[0] for spec in step.weights]
        self._capacity = rates.capacity - step.inputs // mesh.size
        self._model = CostModel(mesh, rates)
        self._options = [sharding_options(mesh, g.letters) for g in layer_groups.groups]
        self._strategies = [[o.strategy(mesh) for o in options] for options in self._options]
        self._boundaries = [[o.rows(mesh) for o in options] for options in self._options]

    @property
    def shape(self) -> str:
        """Returns the mesh's sizes, such as 4x2."""
        return "x".join(map(str, self._mesh.shape))

    def rows(self, policies: Iterable[str]) -> list[RatedCandidate]:
        """Returns the fastest candidate for each policy and each share of the memory."""
        candidates = []
        for policy in policies:
            model = self._model.under(policy)
            for chosen in self._chosen(self._costs(model), self._pairs(model)):
                candidates.append(self._row(chosen, model))
        return candidates

    def smallest(self, policies: Iterable[str]) -> list[RatedCandidate]:
        """Returns the candidate with the least memory for each policy."""
        candidates = []
        for policy in policies:
            model = self._model.under(policy)
            sizes = [[cost.peak for cost in of_group] for of_group in self._costs(model)]
            candidates.append(
                self._row(tuple(of_group.index(min(of_group)) for of_group in sizes), model)
            )
        return candidates

    def _costs(self, model: CostModel) -> list[list[Cost]]:
        return [
            [model.group_cost(g, strategy) for strategy in of_group]
            for g, of_group in zip(self._layer_groups.groups, self._strategies, strict=True)
        ]

    def _chosen(self, costs: list[list[Cost]], pairs: PairCosts) -> list[tuple[int, ...]]:
        choices = [
            [
                OptionCost(cost.seconds, cost.resident, cost.workspace, boundary)
                for cost, boundary in zip(of_group, boundaries, strict=True)
            ]
            for of_group, boundaries in zip(costs, self._boundaries, strict=True)
        ]
        kept = [pareto_optimal(of_group) for of_group in choices]
        reduced = [[of_group[i] for i in k] for of_group, k in zip(choices, kept, strict=True)]
        distinct: dict[tuple[int, ...], None] = {}
        for share in _SHARES:
            numbers = solve(reduced, pairs, self._capacity * share)
            if numbers is None:
                break
            distinct[tuple(k[n] for k, n in zip(kept, numbers, strict=True))] = None
        return [chosen for chosen in distinct if not self._has_mergeable_axes(chosen)]

    def _has_mergeable_axes(self, chosen: tuple[int, ...]) -> bool:
        """Returns whether two neighboring axes have equal roles everywhere, like a single axis."""
        roles_of_axes = list(
            zip(
                *[of_group[i].roles for of_group, i in zip(self._options, chosen, strict=True)],
                strict=True,
            )
        )
        return any(a == b for a, b in itertools.pairwise(roles_of_axes))

    def _pairs(self, model: CostModel) -> PairCosts:
        """Returns the time to reshard the batch between groups."""
        pairs: dict = {}
        for (source, target), flows in self._layer_groups.between.items():
            boundaries = {
                boundary: _batch_strategy(boundary, self._mesh)
                for boundary in self._boundaries[source]
            }
            pairs[source, target] = {
                (one, other): sum(
                    model.flow_cost(f, boundaries[one], _batch_strategy(other, self._mesh)).seconds
                    for f in flows
                )
                for one in boundaries
                for other in dict.fromkeys(self._boundaries[target])
                if one != other
            }
        return pairs

    def _row(self, chosen: tuple[int, ...], model: CostModel) -> RatedCandidate:
        options = [of_group[i] for of_group, i in zip(self._options, chosen, strict=True)]
        tables = [of_group[i] for of_group, i in zip(self._strategies, chosen, strict=True)]
        chosen_candidate = candidate(
            self._layer_groups, options, self._mesh, model.policy, self._paths
        )
        return RatedCandidate(chosen_candidate, model.cost(self._layer_groups, tables))


def _batch_strategy(axes: tuple[str, ...], mesh: Mesh) -> Strategy:
    """Returns a strategy that shards the batch over these axes and nothing else."""
    role = AxisRole(ROWS)
    return ShardingOption(tuple(role if a in axes else AxisRole() for a in mesh.names)).strategy(
        mesh
    )


def _simplest_first(rows: Iterable[RatedCandidate]) -> list[RatedCandidate]:
    """Returns the candidates by seconds, the simplest of about equally fast ones first."""
    pending = sorted(rows, key=lambda row: row.seconds)
    ordered: list[RatedCandidate] = []
    while pending:
        limit = pending[0].seconds * _CLOSE
        close = [row for row in pending if row.seconds <= limit]
        ordered += sorted(close, key=_complexity)
        pending = pending[len(close) :]
    return ordered


def _complexity(row: RatedCandidate) -> tuple:
    c = row.candidate
    axes, is_recomputed = c.mesh.count("="), c.rematerialize != remat_policy.NONE
    return len(c.overrides), axes, is_recomputed, len(c.strategy), row.cost.peak


def _fits(row: RatedCandidate, capacity: int) -> bool:
    return row.compiled.fits if row.compiled else row.cost.peak <= capacity * _SHARES[0]


def _compile(
    rows: list[RatedCandidate],
    compile_candidate: CompileCandidate,
    most: int,
    capacity: int,
    progress: Progress,
) -> list[RatedCandidate]:
    """Returns the candidates, the most promising ones with compiled costs."""
    rows = list(rows)
    # Largest ratio so far of compiled to estimated memory.
    excess = 1.0
    for _ in range(most):
        compiled_rows = [row for row in rows if row.compiled or row.problem]
        open_rows = [
            i for i, row in enumerate(rows) if not any(_is_alike(row, t) for t in compiled_rows)
        ]
        fitting = [i for i in open_rows if rows[i].cost.peak * excess <= capacity]
        if not open_rows:
            break
        smallest = min(open_rows, key=lambda i: rows[i].cost.peak)
        number = fitting[0] if fitting else smallest
        row = rows[number]
        progress.say(f"compiling `mesh={row.candidate.mesh}` `strategy={row.candidate.strategy}`")
        try:
            compiled = compile_candidate(row.candidate)
        except UserError as error:
            rows[number] = dataclasses.replace(row, problem=str(error))
            continue
        rows[number] = dataclasses.replace(row, compiled=compiled)
        excess = max(excess, compiled.peak / max(row.cost.peak, 1))
    return rows


def _is_alike(one: RatedCandidate, other: RatedCandidate) -> bool:
    """Returns whether the model rates two candidates as too similar to compile both."""
    pairs = ((one.cost.seconds, other.cost.seconds), (one.cost.peak, other.cost.peak))
    return all(max(pair) <= min(pair) * _SAME for pair in pairs)


def _baselines(
    step: TracedStep, layer_groups: LayerGroups, devices: int, rates: Rates
) -> Iterable[RatedCandidate]:
    """Yields the named strategies that the cost model can rate, each over all devices."""
    for name in strategies.base_names():
        if name in _UNRATED:
            continue
        axis = "model" if name == "tensor" else "data"
        mesh = Mesh(((axis, devices),))
        strategy = strategies.get(name, mesh)
        cost = CostModel(mesh, rates).cost(layer_groups, [strategy] * len(layer_groups.groups))
        yield RatedCandidate(Candidate(str(mesh), name), cost, name)


@dataclasses.dataclass(frozen=True)
class CompiledCost:
    """Cost of a compiled candidate.

    Attributes:
      fits: whether the step fits in the memory of each device.
      peak: peak bytes of one device.
      seconds: estimated time of one step.
    """

    fits: bool
    peak: int
    seconds: float


# Compiles a candidate. Raises ValueError with the reason if that is impossible.
CompileCandidate = Callable[[Candidate], CompiledCost]


@dataclasses.dataclass(frozen=True)
class RatedCandidate:
    """A candidate with its costs.

    Attributes:
      candidate: the candidate.
      cost: estimate of the cost model.
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
        """Returns the compiled cost if there is one, else the cost model's estimate."""
        return self.compiled.seconds if self.compiled else self.cost.seconds

    @property
    def peak(self) -> int:
        """Returns the compiled cost if there is one, else the cost model's estimate."""
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
      capacity: bytes of a device that a program may use.
    """

    best: RatedCandidate | None
    front: tuple[RatedCandidate, ...]
    rows: tuple[RatedCandidate, ...]
    baselines: tuple[RatedCandidate, ...]
    capacity: int


def front(rows: Iterable[RatedCandidate]) -> tuple[RatedCandidate, ...]:
    """Returns the Pareto front of time and memory, fastest first."""
    pareto: list[RatedCandidate] = []
    for row in sorted(rows, key=lambda r: (r.seconds, r.peak)):
        if not pareto or row.peak < pareto[-1].peak:
            pareto.append(row)
    return tuple(pareto)
