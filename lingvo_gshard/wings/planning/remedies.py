"""Finds plans that fit, where a step as it was asked for does not.

The search's cost model rates changes of the step on the same mesh. The fastest change that fits by
this estimate is compiled, and each compilation corrects the estimate. Changes of what is learned
come last. A machine with more devices for the unchanged step is compared with the change.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from lingvo_gshard.core import SILENT, Params, Progress, UserError
from lingvo_gshard.layers import MixtureOfExperts
from lingvo_gshard.sharding import DEFAULT_STRATEGY, Mesh
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.gin.binding import gin_name
from lingvo_gshard.wings.planning import roofline
from lingvo_gshard.wings.planning.compiling.compilation import TooLargeError
from lingvo_gshard.wings.planning.experiments import (
    PlanOptions,
    plan_experiment,
    planned_partitioning,
)
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan, Remedy
from lingvo_gshard.wings.planning.search import experiment_search
from lingvo_gshard.wings.planning.search.candidates import LayerGroups, TracedStep, group
from lingvo_gshard.wings.planning.search.choices import ChoicePaths, gin_value
from lingvo_gshard.wings.planning.search.cost_model import CostModel
from lingvo_gshard.wings.planning.search.costs import Cost
from lingvo_gshard.wings.planning.search.results import RatedCandidate
from lingvo_gshard.wings.planning.search.search import rows_of_strategy, simplest_first

# The compiled change is likely to fit if the estimate fills at most this share of the memory.
_ROOM = 0.9
# Steps whose estimate exceeds the memory by more are not worth a compilation.
_HOPELESS = 1.5
_SHARD_WEIGHTS = "fsdp"
# Experts' buffers with this much room for uneven loads; more rows are computed in further rounds.
_SMALL_BOUND = 1.25
_SMALL_CAPACITY_FACTOR = 0.5
_MORE_DEVICES = (2, 4, 8)
_BILLION = 1e9
_BATCH, _PRECISION, _OPTIMIZER = "input.batch_rows", "step.precision", "step.optimizer"


@dataclasses.dataclass(frozen=True)
class Answer:
    """Plans of a step, as asked or changed to fit.

    Attributes:
      plans: the plan as asked, if there is one, then those that fit in its place.
      tried: every change that was tried because the step does not fit.
      problem: why there is no plan as asked; empty if there is one.
    """

    plans: tuple[Plan, ...]
    tried: tuple[Remedy, ...] = ()
    problem: str = ""

    @property
    def plan(self) -> Plan:
        """The first plan, with the changes that were tried."""
        return msgspec.structs.replace(self.plans[0], remedies=list(self.tried))


def plan_to_fit(
    experiment: Params,
    topology: Topology,
    options: PlanOptions,
    limit: int = 3,
    progress: Progress = SILENT,
) -> Answer:
    """Returns the plan of an experiment's training step, and plans that fit if it does not.

    Args:
      experiment: Params of the experiment; they are not modified.
      limit: maximum number of changes to try. Each takes one compilation.

    Raises:
      UserError: as `plan_experiment` does; or the step needs far more memory than a device has,
        and no change that was tried makes it fit.
    """
    plan, refusal = None, None
    try:
        plan = plan_experiment(experiment, topology, options, progress)
    except TooLargeError as error:
        if not limit:
            raise
        refusal = error
    if plan is not None and (plan.fits or not limit):
        return Answer((plan,))
    peak = plan.bytes_per_device.peak if plan else refusal.needed if refusal else None
    remedies = _Remedies(experiment, topology, options, limit, progress)
    remedies.run(peak)
    fitting = tuple(remedies.fitting)
    if plan is None and not fitting:
        tried = "".join(f"\n  {row.change}: {_outcome(row)}" for row in remedies.tried)
        raise TooLargeError(f"{refusal} Tried, without a plan that fits:{tried or ' nothing'}")
    asked = (plan,) if plan else ()
    return Answer((*asked, *fitting), tuple(remedies.tried), str(refusal or ""))


def _outcome(row: Remedy) -> str:
    return row.reason or f"{(row.peak or 0) / 2**30:.1f} GiB"


@dataclasses.dataclass(frozen=True)
class _Change:
    """New hyperparameters by path, and a sharding strategy, that reduce the memory of a step."""

    settings: dict[str, object]
    strategy: str


@dataclasses.dataclass(frozen=True)
class _Rated:
    """A change with a candidate of the search, and what the cost model says of both."""

    change: _Change
    row: RatedCandidate
    topology: Topology


class _Remedies:
    """Rates changes and compiles the best: all are in `tried`, the plans that fit in `fitting`."""

    def __init__(
        self,
        experiment: Params,
        topology: Topology,
        options: PlanOptions,
        limit: int,
        progress: Progress,
    ):
        self.tried: list[Remedy] = []
        self.fitting: list[Plan] = []
        self._experiment, self._topology, self._options = experiment, topology, options
        self._limit, self._progress = limit, progress
        self._mesh = planned_partitioning(experiment, topology, options).mesh
        self._strategy = options.strategy or experiment.sharding.strategy or DEFAULT_STRATEGY
        self._paths = ChoicePaths.of(experiment)
        self._traced: dict[str, list[tuple[TracedStep, LayerGroups]]] = {}
        # Compiled by estimated bytes beyond weights and moments, which are known.
        self._excess = 1.0
        self._fitting_policy = ""

    def run(self, peak: int | None) -> None:
        """Compiles changes until one fits, then the unchanged step on more devices.

        The peak of the step as it was asked for corrects the estimates.
        """
        asked = self._as_asked(self._topology, self._mesh)
        if asked and peak:
            self._learn(asked.row.cost, peak)
        groups = self._changes()
        rated: list[_Rated] = []
        while not self.fitting and len(self.tried) < max(self._limit - 1, 1):
            found = self._best(rated)
            if found:
                rated.remove(found)
                self._try(found)
            elif changes := next(groups, None):
                rated += self._rated(changes)
            else:
                break
        if len(self.tried) < self._limit:
            other = self._on_more_devices() or self._other(rated)
            if other:
                self._try(other)

    def _other(self, rated: Sequence[_Rated]) -> _Rated | None:
        """Returns a change of another kind than the one that fits; the smallest if none fits."""
        if self.fitting:
            policy = self._fitting_policy
            return self._best([r for r in rated if r.row.candidate.rematerialize != policy])
        near = [r for r in rated if self._peak(r.row.cost) < _HOPELESS * self._capacity]
        return min(near, key=lambda each: self._peak(each.row.cost), default=None)

    @property
    def _capacity(self) -> int:
        return self._topology.chip.usable_bytes

    def _peak(self, cost: Cost) -> float:
        """Returns the estimated peak of a step, corrected by the compiled ones."""
        state = cost.weights + cost.moments
        return state + (cost.peak - state) * self._excess

    def _may_fit(self, rated: _Rated) -> bool:
        return self._peak(rated.row.cost) <= _ROOM * self._capacity

    def _best(self, rated: Sequence[_Rated]) -> _Rated | None:
        """Returns the fastest change that fits by the estimate."""
        fitting = [r for r in rated if self._may_fit(r)]
        ordered = simplest_first(each.row for each in fitting)
        return next((r for r in fitting if r.row is ordered[0]), None) if ordered else None

    def _changes(self) -> Iterator[list[_Change]]:
        """Yields groups of changes. A group is rated only if no change of earlier groups fits."""
        settings: dict[str, object] = {}
        kept = [_Change({}, self._strategy)]
        strategy = self._strategy
        if "->" not in strategy and _SHARD_WEIGHTS not in strategy.split("_"):
            strategy = f"{strategy}_{_SHARD_WEIGHTS}"
            kept.append(_Change({}, strategy))
        yield kept
        for more in self._further_settings():
            settings |= more
            yield [_Change(dict(settings), strategy)]

    def _further_settings(self) -> Iterator[Mapping[str, object]]:
        """Yields further settings. All but the first change what is learned, the least first."""
        p = self._experiment
        bounds = {
            f"{path}.bound": _SMALL_BOUND
            for path in self._paths.dropless
            if not 0 < p.get(path).bound <= _SMALL_BOUND
        }
        if bounds:
            yield bounds
        if p.get(_PRECISION) == "float32":
            yield {_PRECISION: "bfloat16"}
        if "moment_dtype" in p.get(_OPTIMIZER):
            types = ("float32", "bfloat16", "int8")
            for smaller in types[types.index(p.get(_OPTIMIZER).moment_dtype) + 1 :]:
                yield {f"{_OPTIMIZER}.moment_dtype": smaller}
        rows = p.get(_BATCH)
        while rows >= 2 * self._topology.devices:
            rows //= 2
            yield {_BATCH: rows}
        factors = {
            f"{path}.router.capacity_factor": _SMALL_CAPACITY_FACTOR
            for path, node in p.nodes()
            if _has_large_capacity(node)
        }
        if factors:
            yield factors

    def _steps(self, change: _Change) -> list[tuple[TracedStep, LayerGroups]]:
        """Returns the step with a change, traced for each number of micro-batches."""
        key = repr(change.settings)
        if key not in self._traced:
            self._progress.begin("looking for what fits")
            params = self._changed(change.settings)
            batch = experiments.batch_specs(params)
            steps = experiment_search.traced_steps(params, self._paths, batch, (), self._topology)
            self._traced[key] = [(step, group(step)) for step in steps]
        return self._traced[key]

    def _rated(self, changes: Sequence[_Change]) -> list[_Rated]:
        """Returns each change with all that a step can save and with all micro-batches."""
        found = self._candidates(changes, self._topology, self._mesh)
        return [each for each in found if self._settings(each) or each.change != self._asked]

    def _candidates(
        self, changes: Sequence[_Change], topology: Topology, mesh: Mesh
    ) -> Iterator[_Rated]:
        savings = experiment_search.savings(self._paths, topology)
        rates = experiment_search.rates_of(topology)
        for change in changes:
            for step, groups in self._steps(change):
                model = CostModel(mesh, rates, micro_batches=step.micro_batches)
                for row in rows_of_strategy(change.strategy, groups, step, model, savings):
                    yield _Rated(change, row, topology)

    @property
    def _asked(self) -> _Change:
        return _Change({}, self._strategy)

    def _as_asked(self, topology: Topology, mesh: Mesh) -> _Rated | None:
        """Returns the unchanged step on a machine; None if the cost model cannot rate it."""
        rated = self._candidates([self._asked], topology, mesh)
        return next((each for each in rated if not self._settings(each)), None)

    def _on_more_devices(self) -> _Rated | None:
        """Returns the unchanged step on the smallest machine of such chips that it may fit."""
        if self._topology.compiler == "cpu":
            # A process has as many virtual devices as it has started with.
            return None
        for times in _MORE_DEVICES:
            larger = topologies.larger(self._topology, times)
            if larger is None:
                return None
            meshes = [
                Mesh(tuple((n, s * times if n == name else s) for n, s in self._mesh.axes))
                for name in self._mesh.names
            ]
            rated = [self._as_asked(larger, mesh) for mesh in meshes]
            fitting = [each for each in rated if each and self._may_fit(each)]
            if fitting:
                return min(fitting, key=lambda each: each.row.seconds)
        return None

    def _settings(self, rated: _Rated) -> dict[str, object]:
        """Returns the hyperparameters that a change and its candidate give another value."""
        candidate = msgspec.structs.replace(rated.row.candidate, exchange="")
        values = rated.change.settings | candidate.values(self._paths)
        return {path: v for path, v in values.items() if self._experiment.get(path) != v}

    def _try(self, rated: _Rated) -> None:
        """Compiles a change, and corrects the estimates by its peak."""
        settings, mesh = self._settings(rated), rated.row.candidate.mesh
        moved = rated.topology is not self._topology
        parts = [f"topology={rated.topology.name}", f"mesh={mesh}"] if moved else []
        if rated.change.strategy != self._strategy:
            parts.append(f"strategy={rated.change.strategy}")
        parts += [f"{gin_name(path)} = {gin_value(value)}" for path, value in settings.items()]
        change = " ".join(f"`{part}`" for part in parts)
        self._progress.say(f"it does not fit; trying {change}")
        params = self._changed(settings)
        options = dataclasses.replace(
            self._options,
            strategy=rated.change.strategy,
            mesh=mesh if moved else self._options.mesh,
        )
        try:
            plan = plan_experiment(params, rated.topology, options, self._progress)
        except UserError as error:
            if isinstance(error, TooLargeError) and error.needed:
                self._learn(rated.row.cost, error.needed)
            refused = Remedy(
                change=change, fits=False, peak=None, seconds_per_step=None, reason=str(error)
            )
            self.tried.append(refused)
            return
        self._learn(rated.row.cost, plan.bytes_per_device.peak)
        self.tried.append(_remedy(change, plan, rated.topology))
        if plan.fits:
            self._fitting_policy = rated.row.candidate.rematerialize
            self.fitting.append(msgspec.structs.replace(plan, change=change))

    def _changed(self, settings: Mapping[str, object]) -> Params:
        """Returns a copy of the experiment's Params with these settings."""
        changed = self._experiment.copy()
        for path, value in settings.items():
            changed.set_path(path, value)
        return changed

    def _learn(self, cost: Cost, peak: int) -> None:
        """Corrects the estimates by a compiled peak, both without weights and moments."""
        state = cost.weights + cost.moments
        self._excess = max(self._excess, (peak - state) / max(cost.peak - state, 1))


def _remedy(change: str, plan: Plan, topology: Topology) -> Remedy:
    """Returns what a compiled change costs."""
    spent = None
    if plan.tokens_per_second:
        spent = roofline.budget(_BILLION, 1 / plan.tokens_per_second, topology)
    return Remedy(
        change=change,
        fits=plan.fits,
        peak=plan.bytes_per_device.peak,
        seconds_per_step=plan.seconds_per_step,
        tokens_per_second=plan.tokens_per_second,
        price=spent.price if spent else None,
    )


def _has_large_capacity(node: Params) -> bool:
    """Returns whether experts drop tokens when their capacity slots are full, and have many."""
    cls = node.cls
    if cls is None or not issubclass(cls, MixtureOfExperts) or not cls.has_capacity_factor(node):
        return False
    return (node.router.capacity_factor or math.inf) > _SMALL_CAPACITY_FACTOR
