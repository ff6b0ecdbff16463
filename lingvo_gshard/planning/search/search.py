"""The search: every mesh and policy, the best tables for each, and compilations to decide."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.letters import ROWS
from lingvo_gshard.planning.search import meshes
from lingvo_gshard.planning.search.candidates import Candidate, candidate
from lingvo_gshard.planning.search.choosing import Choice, Pairs, choose, undominated
from lingvo_gshard.planning.search.costs.cost import Cost
from lingvo_gshard.planning.search.costs.cost_model import CostModel
from lingvo_gshard.planning.search.costs.rates import Rates
from lingvo_gshard.planning.search.groups import Grouped, group
from lingvo_gshard.planning.search.results import (
    CompileCandidate,
    Row,
    SearchResult,
    front,
)
from lingvo_gshard.planning.search.traced import roles
from lingvo_gshard.planning.search.traced.graph import Traced
from lingvo_gshard.planning.search.traced.roles import Option
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Strategy

# Of the device's memory, what the model may fill: it leaves out what elementwise operations hold.
# The front is sought at the smaller shares as well.
_SHARES = (0.9, 0.65, 0.45, 0.3, 0.2)
# Of two candidates this close in seconds, the simpler one: the model knows no better.
_CLOSE = 1.03
# And this close in seconds and bytes they are too much the same to compile both.
_SAME = 1.01
# Named strategies that split L or P.
_BEYOND_THE_MODEL = ("sequence", "context", "pipeline")

Progress = Callable[[str], None]


def search(
    traced: Traced,
    devices: int,
    rates: Rates,
    compile_candidate: CompileCandidate | None = None,
    compile_best: int = 4,
    policies: Sequence[str] = tuple(remat_policy.POLICIES),
    torus: tuple[int, ...] = (),
    most_axes: int = 3,
    on_progress: Progress | None = None,
) -> SearchResult:
    """Returns the fastest ways that fit to run a traced step on so many devices.

    compile_candidate: decides among the `compile_best` that the model thinks fastest and to fit;
        where the compiler finds that one needs more memory than the model knew, the next ones are
        taken smaller. Without it the model's word is final.
    policies: of rematerialization, those to try. torus: the interconnect's shape in devices, if it
        is one. most_axes: of a mesh.
    """
    tell = on_progress or (lambda text: None)
    grouped = group(traced)
    on_meshes = [
        _OnMesh(traced, grouped, meshes.unnamed(sizes), rates)
        for sizes in meshes.shapes(devices, torus, most_axes) or [(devices,)]
    ]
    rows: dict[Candidate, Row] = {}
    for on_mesh in on_meshes:
        for row in on_mesh.rows(policies):
            rows.setdefault(row.candidate, row)
        tell(f"{len(rows)} candidates, up to meshes of {on_mesh.shape}")
    if not rows:
        tell("the model finds nothing that fits; looking for what comes nearest")
        for on_mesh in on_meshes:
            rows.update({row.candidate: row for row in on_mesh.smallest(policies)})
    ordered = _simplest_first(rows.values())
    capacity = rates.capacity
    if compile_candidate is not None:
        ordered = _compile(ordered, compile_candidate, compile_best, capacity, tell)
    counting = [row for row in ordered if row.compiled] if compile_candidate else ordered
    fitting = [row for row in counting if _fits(row, capacity)]
    if compile_candidate is not None:
        fitting.sort(key=lambda row: row.seconds)
    best = fitting[0] if fitting else None
    yardsticks = tuple(_yardsticks(traced, grouped, devices, rates))
    return SearchResult(best, front(counting), tuple(ordered), yardsticks, capacity)


class _OnMesh:
    """The options of every group on one mesh, and what they cost."""

    def __init__(self, traced: Traced, grouped: Grouped, mesh: Mesh, rates: Rates):
        self._grouped, self._mesh = grouped, mesh
        self._paths = [spec.path.rpartition(".")[0] for spec in traced.weights]
        self._capacity = rates.capacity - traced.inputs // mesh.size
        self._model = CostModel(mesh, rates)
        self._options = [roles.options(mesh, g.letters) for g in grouped.groups]
        self._strategies = [[o.strategy(mesh) for o in options] for options in self._options]
        self._faces = [[o.rows(mesh) for o in options] for options in self._options]

    @property
    def shape(self) -> str:
        """The mesh's sizes."""
        return "x".join(map(str, self._mesh.shape))

    def rows(self, policies: Iterable[str]) -> list[Row]:
        """Returns the fastest candidates under each policy and in each share of the memory."""
        found = []
        for policy in policies:
            model = self._model.under(policy)
            for chosen in self._chosen(self._costs(model), self._pairs(model)):
                found.append(self._row(chosen, model))
        return found

    def smallest(self, policies: Iterable[str]) -> list[Row]:
        """Returns the candidate of least memory under each policy, of those that do not fit."""
        found = []
        for policy in policies:
            model = self._model.under(policy)
            sizes = [[cost.peak for cost in of_group] for of_group in self._costs(model)]
            found.append(
                self._row(tuple(of_group.index(min(of_group)) for of_group in sizes), model)
            )
        return found

    def _costs(self, model: CostModel) -> list[list[Cost]]:
        return [
            [model.group_cost(g, strategy) for strategy in of_group]
            for g, of_group in zip(self._grouped.groups, self._strategies, strict=True)
        ]

    def _chosen(self, costs: list[list[Cost]], pairs: Pairs) -> list[tuple[int, ...]]:
        choices = [
            [
                Choice(cost.seconds, cost.held, cost.working, face)
                for cost, face in zip(of_group, faces, strict=True)
            ]
            for of_group, faces in zip(costs, self._faces, strict=True)
        ]
        kept = [undominated(of_group) for of_group in choices]
        few = [[of_group[i] for i in k] for of_group, k in zip(choices, kept, strict=True)]
        found: dict[tuple[int, ...], None] = {}
        for share in _SHARES:
            numbers = choose(few, pairs, self._capacity * share)
            if numbers is None:
                break
            found[tuple(k[n] for k, n in zip(kept, numbers, strict=True))] = None
        return [chosen for chosen in found if not self._is_of_fewer_axes(chosen)]

    def _is_of_fewer_axes(self, chosen: tuple[int, ...]) -> bool:
        """Whether two neighbouring axes split the same everywhere: then they are one axis."""
        roles_of_axes = list(
            zip(
                *[of_group[i].roles for of_group, i in zip(self._options, chosen, strict=True)],
                strict=True,
            )
        )
        return any(a == b for a, b in itertools.pairwise(roles_of_axes))

    def _pairs(self, model: CostModel) -> Pairs:
        """Seconds of handing the batch on between groups that split it otherwise."""
        pairs: dict = {}
        for (source, target), flows in self._grouped.between.items():
            faces = {face: _of_rows(face, self._mesh) for face in self._faces[source]}
            pairs[source, target] = {
                (one, other): sum(
                    model.flow_cost(f, faces[one], _of_rows(other, self._mesh)).seconds
                    for f in flows
                )
                for one in faces
                for other in dict.fromkeys(self._faces[target])
                if one != other
            }
        return pairs

    def _row(self, chosen: tuple[int, ...], model: CostModel) -> Row:
        options = [of_group[i] for of_group, i in zip(self._options, chosen, strict=True)]
        tables = [of_group[i] for of_group, i in zip(self._strategies, chosen, strict=True)]
        found = candidate(self._grouped, options, self._mesh, model.policy, self._paths)
        return Row(found, model.cost(self._grouped, tables))


def _of_rows(axes: tuple[str, ...], mesh: Mesh) -> Strategy:
    """A strategy that splits the batch over these axes, and no more."""
    role = roles.Role(ROWS)
    return Option(tuple(role if a in axes else roles.Role() for a in mesh.names)).strategy(mesh)


def _simplest_first(rows: Iterable[Row]) -> list[Row]:
    """The rows by seconds; of those that are as fast as one another the simplest first."""
    pending = sorted(rows, key=lambda row: row.seconds)
    ordered: list[Row] = []
    while pending:
        limit = pending[0].seconds * _CLOSE
        close = [row for row in pending if row.seconds <= limit]
        ordered += sorted(close, key=_complexity)
        pending = pending[len(close) :]
    return ordered


def _complexity(row: Row) -> tuple:
    c = row.candidate
    axes, again = c.mesh.count("="), c.rematerialize != remat_policy.NONE
    return len(c.overrides), axes, again, len(c.strategy), row.cost.peak


def _fits(row: Row, capacity: int) -> bool:
    return row.compiled.fits if row.compiled else row.cost.peak <= capacity * _SHARES[0]


def _compile(
    rows: list[Row], compile_candidate: CompileCandidate, most: int, capacity: int, tell: Progress
) -> list[Row]:
    """The rows, the most promising with the compiler's figures."""
    rows = list(rows)
    # How much more memory than the model says the compiler needs.
    excess = 1.0
    for _ in range(most):
        tried = [row for row in rows if row.compiled or row.problem]
        open_rows = [i for i, row in enumerate(rows) if not any(_is_alike(row, t) for t in tried)]
        fitting = [i for i in open_rows if rows[i].cost.peak * excess <= capacity]
        if not open_rows:
            break
        smallest = min(open_rows, key=lambda i: rows[i].cost.peak)
        number = fitting[0] if fitting else smallest
        row = rows[number]
        tell(f"compiling --mesh={row.candidate.mesh} --strategy={row.candidate.strategy}")
        try:
            compiled = compile_candidate(row.candidate)
        except ValueError as error:
            rows[number] = dataclasses.replace(row, problem=str(error))
            continue
        rows[number] = dataclasses.replace(row, compiled=compiled)
        excess = max(excess, compiled.peak / max(row.cost.peak, 1))
    return rows


def _is_alike(one: Row, other: Row) -> bool:
    """Whether the model sees too little difference for a compilation to be worth its time."""
    pairs = ((one.cost.seconds, other.cost.seconds), (one.cost.peak, other.cost.peak))
    return all(max(pair) <= min(pair) * _SAME for pair in pairs)


def _yardsticks(traced: Traced, grouped: Grouped, devices: int, rates: Rates) -> Iterable[Row]:
    """The named strategies, each over all devices, by the model.

    But for those that split L or P: the model of costs knows no attention among parts of rows, and
    no stages.
    """
    for name in strategies.base_names():
        if name in _BEYOND_THE_MODEL:
            continue
        axis = "model" if name == "tensor" else "data"
        mesh = Mesh(((axis, devices),))
        strategy = strategies.get(name, mesh)
        cost = CostModel(mesh, rates).cost(grouped, [strategy] * len(grouped.groups))
        yield Row(Candidate(str(mesh), name), cost, name)
