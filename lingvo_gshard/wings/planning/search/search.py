"""Searches meshes, shardings, rematerialization policies and micro-batches for the fastest step.

A cost model rates all candidates, and the best are compiled to decide. The best of these is then
compiled with other values of the choices that the cost model cannot rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Sequence

import msgspec

from lingvo_gshard.core import SILENT, Progress, UserError, letters, remat_policy
from lingvo_gshard.sharding import Mesh, Strategy, strategies
from lingvo_gshard.wings.planning.search.candidates import (
    AxisRole,
    LayerGroups,
    ShardingOption,
    TracedStep,
    candidate,
    factorizations,
    group,
    sharding_options,
)
from lingvo_gshard.wings.planning.search.choices import Candidate, Saving, Variant
from lingvo_gshard.wings.planning.search.cost_model import CostModel
from lingvo_gshard.wings.planning.search.costs import Cost, Rates
from lingvo_gshard.wings.planning.search.ilp import OptionCost, PairCosts, pareto_optimal, solve
from lingvo_gshard.wings.planning.search.results import (
    CompileCandidate,
    RatedCandidate,
    SearchResult,
    front,
)

_LETTERS = "abc"


def mesh_shapes(
    devices: int, torus: tuple[int, ...] = (), most_axes: int = 3
) -> list[tuple[int, ...]]:
    """Returns mesh shapes of up to `most_axes` axes, fewest axes first.

    Three axes are listed only in descending order of size: the sharding options already permute
    their use, and the devices of the last axis are neighbors, so it is best the smallest.

    Args:
      torus: shape of the interconnect. Axes then align with its dimensions.
    """
    return [
        sizes
        for axes in range(1, most_axes + 1)
        for sizes in factorizations(devices, axes)
        if devices > 1
        and (axes < 3 or list(sizes) == sorted(sizes, reverse=True))
        and _follows(sizes, torus)
    ]


def unnamed_mesh(sizes: tuple[int, ...]) -> Mesh:
    """Returns a mesh of these sizes with placeholder names."""
    return Mesh(tuple(zip(_LETTERS, sizes, strict=False)))


def _follows(sizes: tuple[int, ...], torus: tuple[int, ...]) -> bool:
    """Returns whether every axis divides a dimension of the torus or spans whole dimensions."""
    if math.prod(torus) != math.prod(sizes):
        return True
    ends = [math.prod(torus[i:]) for i in range(len(torus))]
    starts = [math.prod(sizes[i:]) for i in range(len(sizes))]
    return all(a % b == 0 or b % a == 0 for a in ends for b in starts)


_seconds = operator.attrgetter("seconds")

# Shares of the device's memory that the cost model may fill. The first share leaves room for
# elementwise operations, which the model ignores. The other shares give the rest of the Pareto
# front.
_SHARES = (0.9, 0.65, 0.45, 0.3, 0.2)
# Capacity, relative to the device's, that no program exceeds.
_PLENTY = 1000
# Candidates whose times differ by less than this ratio count as equally fast, since the cost model
# is not more accurate. The simpler candidate is then preferred.
_CLOSE = 1.03
# Of two candidates whose times and bytes differ by less than this ratio, only one is compiled. A
# variant of the best candidate must be faster by more.
_SAME = 1.01
# Named strategies that the cost model cannot rate: it knows neither sharded positions nor stages.
_UNRATED = ("sequence", "context", "pipeline")
# Named strategies of several axes, with the names of these.
_JOINED = {
    "expert_fsdp": ("data", "fsdp"),
    "expert_tensor": ("data", "model"),
    "fsdp_tensor": ("data", "model"),
}


def search(
    step: TracedStep,
    devices: int,
    rates: Rates,
    compile_candidate: CompileCandidate | None = None,
    compile_best: int = 4,
    savings: Sequence[Saving] = tuple(map(Saving, remat_policy.ON_DEVICE)),
    torus: tuple[int, ...] = (),
    most_axes: int = 3,
    progress: Progress = SILENT,
    others: Sequence[TracedStep] = (),
    variants: Sequence[Variant] = (),
    seconds_bound: float = 0.0,
) -> SearchResult:
    """Returns the fastest ways to run a traced step that fit in memory.

    Args:
      compile_candidate: compiles the best candidates to decide among them. None decides by the cost
        model alone.
      compile_best: number of candidates to compile, beside the best named strategy. If one needs
        more memory than the model estimated, the next ones are chosen smaller.
      savings: what to try: rematerialization policies and places of the moments.
      torus: shape of the interconnect in devices; empty if it is no torus.
      others: the same step with other numbers of micro-batches or another precision.
      variants: changes that the cost model cannot rate. The best candidate is compiled with each.
      seconds_bound: no step takes less. A candidate that does by the cost model is left out.
    """
    steps = (step, *others)
    meshes = [unnamed_mesh(x) for x in mesh_shapes(devices, torus, most_axes) or [(devices,)]]
    groups = [group(each) for each in steps]
    searches = [
        _MeshSearch(each, layer_groups, mesh, rates)
        for mesh in meshes
        for each, layer_groups in zip(steps, groups, strict=True)
    ]
    capacity = rates.capacity
    named = _possible(_baselines(steps, groups, meshes, rates, savings), seconds_bound)
    fitting = [row for row in named if _fits(row, capacity)]
    if fitting:
        progress.say(f"of the named strategies, {_in_words(min(fitting, key=_seconds))}")
    ordered = simplest_first(_possible(_rate(searches, savings, progress), seconds_bound))
    if compile_candidate is not None:
        ordered = _compile(ordered, compile_candidate, compile_best, capacity, progress)
        named = _compile_best_named(named, compile_candidate, capacity, progress)
        best, tried = _with_variants([*ordered, *named], compile_candidate, variants, progress)
        ordered += tried
    else:
        best = _best_by_model(ordered, named, capacity)
    compiled = [row for row in (*ordered, *named) if row.compiled]
    considered = compiled if compile_candidate else _not_faster(best, ordered, capacity)
    return SearchResult(
        best, front(considered), tuple(ordered), tuple(named), capacity, seconds_bound
    )


def _possible(rows: Iterable[RatedCandidate], seconds_bound: float) -> list[RatedCandidate]:
    """Returns the rows. A row that is faster than any step can be gets a problem."""
    problem = (
        f"faster than the {seconds_bound:.3g} s that the model's products take at the chip's peak: "
        "an error of the cost model, please report it"
    )
    return [
        dataclasses.replace(row, problem=problem) if row.cost.seconds < seconds_bound else row
        for row in rows
    ]


def _best_by_model(
    ordered: Sequence[RatedCandidate], named: Sequence[RatedCandidate], capacity: int
) -> RatedCandidate | None:
    """Returns the first candidate that fits, or a named strategy if that one is faster."""
    best = next((row for row in ordered if _fits(row, capacity)), None)
    fitting = [row for row in (best, *named) if row and _fits(row, capacity)]
    return min(fitting, key=_seconds, default=None)


def _not_faster(
    best: RatedCandidate | None, rows: Sequence[RatedCandidate], capacity: int
) -> list[RatedCandidate]:
    """Returns the best candidate and slower ones. Faster ones are as good, and less simple."""
    if best is None:
        return [row for row in rows if not row.problem]
    return [best, *(row for row in rows if row.seconds > best.seconds and _fits(row, capacity))]


def _rate(
    searches: Sequence[_MeshSearch], savings: Sequence[Saving], progress: Progress
) -> list[RatedCandidate]:
    """Returns the best candidates of all meshes, or the smallest ones if none fits."""
    rows: dict[Candidate, RatedCandidate] = {}
    for number, mesh_search in enumerate(searches, 1):
        for row in mesh_search.rows(savings):
            rows.setdefault(row.candidate, row)
        best = _in_words(min(rows.values(), key=_seconds)) if rows else "none fits yet"
        done = f"{number} of {len(searches)}: {len(rows)} candidates, up to {mesh_search}"
        progress.say(f"{done}; {best}")
    if not rows:
        progress.say("no candidate fits by the cost model; looking for the smallest")
        for mesh_search in searches:
            rows.update({row.candidate: row for row in mesh_search.smallest(savings)})
    return list(rows.values())


def _in_words(row: RatedCandidate) -> str:
    c = row.candidate
    return f"the fastest takes {row.seconds:.3g} s: `mesh={c.mesh}` `strategy={c.strategy}`"


class _MeshSearch:
    """The search on one mesh: the options of each group and their costs."""

    def __init__(self, step: TracedStep, layer_groups: LayerGroups, mesh: Mesh, rates: Rates):
        self._step, self._layer_groups, self._mesh = step, layer_groups, mesh
        self._capacity = rates.capacity - step.inputs // mesh.size
        self._fitting: dict[Saving, bool] = {}
        self._model = CostModel(mesh, rates, micro_batches=step.micro_batches)
        self._options = [sharding_options(mesh, g.letters) for g in layer_groups.groups]
        self._strategies = [[o.strategy(mesh) for o in options] for options in self._options]
        self._boundaries = [[o.rows(mesh) for o in options] for options in self._options]
        self._kept: list[list[int]] = []
        self._known_pairs: dict[bool, PairCosts] = {}

    def __str__(self) -> str:
        shape = "x".join(map(str, self._mesh.shape))
        return f"meshes of {shape} with {self._step.micro_batches} micro-batches"

    def rows(self, savings: Iterable[Saving]) -> list[RatedCandidate]:
        """Returns the fastest candidate for each saving and each share of the memory.

        Where the fastest of all shardings fits, copies to the memory of the host only take time.
        """
        savings, candidates = list(savings), []
        self._keep_useful(savings)
        for saving in savings:
            if saving != saving.on_device and self._fits_at_once(saving.on_device):
                continue
            model = self._model.under(saving)
            chosen = self._chosen(self._costs(model), self._pairs(model))
            candidates += [self._row(each, model) for each in chosen]
        return candidates

    def _keep_useful(self, savings: Sequence[Saving]) -> None:
        """Keeps the options that no other one beats with the most and the least memory saved.

        An option that is useful with another saving alone is not worth the time to rate them all.
        """
        self._kept = [list(range(len(options))) for options in self._options]
        useful: list[set[int]] = [set() for _ in self._options]
        for saving in dict.fromkeys((savings[0], Saving("full"), savings[-1])):
            if saving in savings:
                kept, _ = self._reduced(self._costs(self._model.under(saving)))
                for found, numbers in zip(useful, kept, strict=True):
                    found.update(numbers)
        self._kept = [sorted(found) for found in useful]

    def _fits_at_once(self, saving: Saving) -> bool:
        """Returns whether the fastest sharding of all fits."""
        if saving not in self._fitting:
            model = self._model.under(saving)
            kept, reduced = self._reduced(self._costs(model))
            numbers = solve(reduced, self._pairs(model), self._capacity * _PLENTY)
            assert numbers is not None, "nothing exceeds this capacity"
            peak = self._row(_numbered(kept, numbers), model).cost.peak
            self._fitting[saving] = peak <= self._capacity * _SHARES[0]
        return self._fitting[saving]

    def smallest(self, savings: Iterable[Saving]) -> list[RatedCandidate]:
        """Returns the candidate with the least memory for each saving."""
        candidates = []
        for model in map(self._model.under, savings):
            sizes = [[cost.peak for cost in of_group] for of_group in self._costs(model)]
            smallest = [of_group.index(min(of_group)) for of_group in sizes]
            candidates.append(self._row(_numbered(self._kept, smallest), model))
        return candidates

    def _costs(self, model: CostModel) -> list[list[Cost]]:
        return [
            [model.group_cost(g, of_group[i]) for i in kept]
            for g, of_group, kept in zip(
                self._layer_groups.groups, self._strategies, self._kept, strict=True
            )
        ]

    def _chosen(self, costs: list[list[Cost]], pairs: PairCosts) -> list[tuple[int, ...]]:
        kept, reduced = self._reduced(costs)
        distinct: dict[tuple[int, ...], None] = {}
        for share in _SHARES:
            numbers = solve(reduced, pairs, self._capacity * share)
            if numbers is None:
                break
            distinct[_numbered(kept, numbers)] = None
        return [chosen for chosen in distinct if not self._has_mergeable_axes(chosen)]

    def _reduced(self, costs: list[list[Cost]]) -> tuple[list[list[int]], list[list[OptionCost]]]:
        """Returns the numbers of the options that no other one beats, and their costs."""
        choices = [
            [
                OptionCost(cost.seconds, cost.resident, cost.workspace, boundary)
                for cost, boundary in zip(of_group, [boundaries[i] for i in numbers], strict=True)
            ]
            for of_group, boundaries, numbers in zip(
                costs, self._boundaries, self._kept, strict=True
            )
        ]
        best = [pareto_optimal(of_group) for of_group in choices]
        kept = [[k[i] for i in b] for k, b in zip(self._kept, best, strict=True)]
        return kept, [[of_group[i] for i in b] for of_group, b in zip(choices, best, strict=True)]

    def _has_mergeable_axes(self, chosen: tuple[int, ...]) -> bool:
        """Returns whether two neighboring axes have equal roles everywhere, like a single axis."""
        roles = [of_group[i].roles for of_group, i in zip(self._options, chosen, strict=True)]
        return any(a == b for a, b in itertools.pairwise(zip(*roles, strict=True)))

    def _pairs(self, model: CostModel) -> PairCosts:
        """Returns the time to reshard the batch between groups."""
        is_recomputed = model.saving.policy != remat_policy.NONE
        if is_recomputed in self._known_pairs:
            return self._known_pairs[is_recomputed]
        named = {
            boundary: _batch_strategy(boundary, self._mesh)
            for boundaries in self._boundaries
            for boundary in dict.fromkeys(boundaries)
        }
        pairs: dict = {}
        for (source, target), flows in self._layer_groups.between.items():
            pairs[source, target] = {
                (one, other): sum(
                    model.flow_cost(f, named[one], named[other]).seconds for f in flows
                )
                for one in dict.fromkeys(self._boundaries[source])
                for other in dict.fromkeys(self._boundaries[target])
                if one != other
            }
        self._known_pairs[is_recomputed] = pairs
        return pairs

    def _row(self, chosen: tuple[int, ...], model: CostModel) -> RatedCandidate:
        options = [of_group[i] for of_group, i in zip(self._options, chosen, strict=True)]
        tables = [of_group[i] for of_group, i in zip(self._strategies, chosen, strict=True)]
        cost = model.cost(self._layer_groups, tables)
        found = candidate(self._layer_groups, options, self._mesh, model.saving, self._step)
        return RatedCandidate(msgspec.structs.replace(found, exchange=cost.exchange), cost)


def _numbered(kept: list[list[int]], numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of options by their numbers among those that were kept."""
    return tuple(k[n] for k, n in zip(kept, numbers, strict=True))


def _batch_strategy(axes: tuple[str, ...], mesh: Mesh) -> Strategy:
    """Returns a strategy that shards the batch over these axes and nothing else."""
    roles = (AxisRole(letters.ROWS if axis in axes else "") for axis in mesh.names)
    return ShardingOption(tuple(roles)).strategy(mesh)


def simplest_first(rows: Iterable[RatedCandidate]) -> list[RatedCandidate]:
    """Returns the candidates by seconds, the simplest of about equally fast ones first."""
    pending = sorted(rows, key=_seconds)
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
    hosted = remat_policy.is_offloaded(c.rematerialize) + c.offload_moments
    size = len(c.strategy), row.cost.peak
    return len(c.overrides), axes, hosted, is_recomputed, c.micro_batches, *size


def _fits(row: RatedCandidate, capacity: int) -> bool:
    if row.problem:
        return False
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
        if not open_rows:
            break
        smallest = min(open_rows, key=lambda i: rows[i].cost.peak)
        fitting = (i for i in open_rows if rows[i].cost.peak * excess <= capacity)
        number = next(fitting, smallest)
        row = rows[number]
        progress.say(f"compiling `mesh={row.candidate.mesh}` `strategy={row.candidate.strategy}`")
        row = rows[number] = _compiled(row, compile_candidate)
        if row.compiled:
            excess = max(excess, row.compiled.peak / max(row.cost.peak, 1))
    return rows


def _compiled(row: RatedCandidate, compile_candidate: CompileCandidate) -> RatedCandidate:
    """Returns a candidate with its compiled cost, or with the reason why there is none."""
    try:
        return dataclasses.replace(row, compiled=compile_candidate(row.candidate))
    except UserError as error:
        return dataclasses.replace(row, problem=str(error))


def _compile_best_named(
    named: Sequence[RatedCandidate],
    compile_candidate: CompileCandidate,
    capacity: int,
    progress: Progress,
) -> list[RatedCandidate]:
    """Returns the named strategies, the one that the cost model rates best with compiled costs."""
    fitting = [row for row in named if _fits(row, capacity)]
    if not fitting:
        return list(named)
    best = min(fitting, key=_seconds)
    progress.say(f"compiling the best named strategy, {best.name}")
    compiled = _compiled(best, compile_candidate)
    return [compiled if row is best else row for row in named]


def _with_variants(
    rows: Sequence[RatedCandidate],
    compile_candidate: CompileCandidate,
    variants: Sequence[Variant],
    progress: Progress,
) -> tuple[RatedCandidate | None, list[RatedCandidate]]:
    """Compiles the best compiled candidate with each variant. Keeps those that make it faster.

    The cost model rates a variant like the candidate without it. Returns the best candidate, None
    if no compiled one fits, and all variants.
    """
    fitting = [row for row in rows if row.compiled and row.compiled.fits]
    if not fitting:
        return None, []
    best, found = min(fitting, key=_seconds), []
    for variant in variants:
        progress.say(f"compiling the best candidate with {variant}")
        changed = dataclasses.replace(
            best, candidate=variant.applied(best.candidate), compiled=None
        )
        row = _compiled(changed, compile_candidate)
        found.append(row)
        if row.compiled and row.compiled.fits and row.seconds * _SAME < best.seconds:
            best = row
    return best, found


def _is_alike(one: RatedCandidate, other: RatedCandidate) -> bool:
    """Returns whether the model rates two candidates as too similar to compile both."""
    pairs = ((one.cost.seconds, other.cost.seconds), (one.cost.peak, other.cost.peak))
    return all(max(pair) <= min(pair) * _SAME for pair in pairs)


def _baselines(
    steps: Sequence[TracedStep],
    groups: Sequence[LayerGroups],
    meshes: Sequence[Mesh],
    rates: Rates,
    savings: Sequence[Saving],
) -> Iterable[RatedCandidate]:
    """Yields the named strategies that the cost model can rate.

    Each has the mesh, the saving and the micro-batches that are the fastest that fit, else the
    smallest.
    """
    models: dict[tuple, CostModel] = {}
    for name, axes in _named_strategies(groups[0]):
        rows = []
        for mesh in meshes:
            if len(mesh.axes) != len(axes):
                continue
            named = Mesh(tuple(zip(axes, mesh.shape, strict=True)))
            for step, layer_groups in zip(steps, groups, strict=True):
                model = CostModel(named, rates, micro_batches=step.micro_batches)
                model = models.setdefault((named, step.micro_batches, step.precision), model)
                rows += rows_of_strategy(name, layer_groups, step, model, savings)
        fitting = [row for row in rows if _fits(row, rates.capacity)]
        if rows:
            yield min(fitting or rows, key=lambda row: row.seconds if fitting else row.peak)


def _named_strategies(groups: LayerGroups) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Yields the names of strategies, each with the axes of its meshes."""
    for name in strategies.base_names():
        if name not in _UNRATED:
            yield name, ("model",) if name == "tensor" else ("data",)
    has_experts = any("E" in group.letters for group in groups.groups)
    for name, axes in _JOINED.items():
        if has_experts or "expert" not in name:
            yield name, axes


def rows_of_strategy(
    name: str,
    layer_groups: LayerGroups,
    step: TracedStep,
    model: CostModel,
    savings: Sequence[Saving],
) -> Iterable[RatedCandidate]:
    """Yields a step under one strategy with each saving; nothing if the mesh lacks its axes."""
    try:
        strategy = strategies.get(name, model.mesh)
    except UserError:
        # It needs other axes.
        return
    for saving in savings:
        tables = [strategy] * len(layer_groups.groups)
        cost = model.under(saving).cost(layer_groups, tables)
        chosen = Candidate(
            str(model.mesh),
            name,
            (),
            saving.policy,
            step.micro_batches,
            step.precision,
            offload_moments=saving.offloads_moments,
            exchange=cost.exchange,
        )
        yield RatedCandidate(chosen, cost, name)
