"""CostModel: the cost of groups of layers that strategies shard over a mesh, term by term.

The gradient of an einsum is two einsums. Einsums and collectives do not overlap. Of elementwise
operations only the optimizer's memory traffic counts.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from lingvo_gshard.core import VariableSpec, remat_policy
from lingvo_gshard.layers import exchanges_rows
from lingvo_gshard.sharding import Mesh, Partitioning, Strategy, strategies
from lingvo_gshard.wings.planning.search import costs
from lingvo_gshard.wings.planning.search.candidates import (
    Einsum,
    ExpertRows,
    Flow,
    LayerGroup,
    LayerGroups,
    Tensor,
)
from lingvo_gshard.wings.planning.search.choices import SAVE_ALL, Saving
from lingvo_gshard.wings.planning.search.exchanges import exchanged, possible_exchanges


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight with its optimizer moments.

    Attributes:
      times: iterations of the loop that the weight is stacked for; 1 outside of loops.
      is_computed_with: whether an einsum has it as an operand. The einsum's gradient then contains
        the reduction of the weight's gradient over the batch.
    """

    tensor: Tensor
    moments: tuple[Tensor, ...]
    times: int
    is_computed_with: bool


@dataclasses.dataclass(frozen=True, eq=False)
class CostTerm:
    """A term of a group's cost.

    Attributes:
      count: number of equal einsums, flows or weights in the group.
      letters: (kind of table, letter) of each sharding rule that the cost depends on.
      unit: index of the kind of rematerialization unit that an einsum belongs to.
      per_unit: number of equal einsums in one unit.
    """

    what: Einsum | Flow | Weight
    count: int
    letters: tuple[tuple[str, str], ...]
    unit: int = 0
    per_unit: int = 1


@functools.cache
def cost_terms(group: LayerGroup) -> tuple[CostTerm, ...]:
    """Returns the terms of a group's cost."""
    terms = []
    for number, (einsums, count) in enumerate(_units(group)):
        for einsum, per_unit in collections.Counter(einsums).items():
            letters = _letters(einsum)
            terms.append(CostTerm(einsum, count * per_unit, letters, number, per_unit))
    for flow, count in _flows(group):
        letters = _pairs("activations", flow.source.layout + flow.target.layout)
        terms.append(CostTerm(flow, count, letters))
    for weight, count in _weights(group):
        letters = _pairs("weights", weight.tensor.layout) + _pairs("moments", weight.tensor.layout)
        terms.append(CostTerm(weight, count, (*letters, ("activations", "B"))))
    return tuple(terms)


def _letters(einsum: Einsum) -> tuple[tuple[str, str], ...]:
    letters: dict[str, str] = {"activations": "", "weights": ""}
    for tensor in (*einsum.operands, einsum.result):
        letters["weights" if tensor.is_weight else "activations"] += tensor.layout
    if einsum.is_lookup:
        letters["activations"] += letters["weights"]
    return tuple(pair for kind, text in letters.items() for pair in _pairs(kind, text))


def _pairs(kind: str, letters: str) -> tuple[tuple[str, str], ...]:
    return tuple((kind, letter) for letter in dict.fromkeys(letters))


def _units(group: LayerGroup) -> list[tuple[tuple[Einsum, ...], int]]:
    by_unit: dict[str, list[Einsum]] = {}
    for einsum in group.einsums:
        plain = dataclasses.replace(einsum, path="", weights=(), unit=_alike(einsum.unit))
        by_unit.setdefault(einsum.unit, []).append(plain)
    return list(collections.Counter(map(tuple, by_unit.values())).items())


def _flows(group: LayerGroup) -> list[tuple[Flow, int]]:
    plain = (
        dataclasses.replace(f, source_path="", target_path="", unit=_alike(f.unit))
        for f in group.flows
    )
    return list(collections.Counter(plain).items())


def _weights(group: LayerGroup) -> list[tuple[Weight, int]]:
    computed = {path for einsum in group.einsums for path in einsum.weights}
    weights = [
        Weight(
            tensor=_tensor(spec),
            moments=tuple(map(_tensor, moments)),
            times=spec.shape[0] if spec.layout.startswith("R") else 1,
            is_computed_with=spec.path in computed,
        )
        for spec, moments in zip(group.weights, group.moments, strict=True)
    ]
    return list(collections.Counter(weights).items())


def _alike(unit: str) -> str:
    return "unit" if unit else ""


def _tensor(spec: VariableSpec) -> Tensor:
    return Tensor(spec.layout, spec.shape, spec.dtype, spec.unsplit)


# Gradients are summed over micro-batches in float32, of so many bytes.
_FLOAT32 = 4

# (kind, axes, times, phase) -> bytes of weight gradients and updates that are moved together.
Summed = collections.Counter[tuple[str, tuple[str, ...], int, str]]


@dataclasses.dataclass
class TermCost:
    """The cost of a term.

    Attributes:
      cost: the cost without `hoisted` and `summed`.
      hoisted: the cost of what XLA moves out of the loop over micro-batches.
      summed: bytes of gradients, which collectives move together with other terms' gradients.
    """

    cost: costs.Cost = dataclasses.field(default_factory=costs.Cost)
    hoisted: costs.Cost = dataclasses.field(default_factory=costs.Cost)
    summed: Summed = dataclasses.field(default_factory=collections.Counter)


class StrategySharding:
    """The sharding of tensors and einsums under one strategy on one mesh."""

    def __init__(
        self,
        mesh: Mesh,
        rates: costs.Rates,
        strategy: Strategy,
        cache: dict[tuple, costs.ShardedEinsum],
    ):
        self.mesh, self.rates, self.strategy = mesh, rates, strategy
        self._partitioning, self._cache = Partitioning(mesh, strategy), cache

    def shard_einsum(
        self, operands: tuple[costs.ShardedTensor, costs.ShardedTensor], result: costs.ShardedTensor
    ) -> costs.ShardedEinsum:
        """Returns the fastest way to compute an einsum."""
        key = tuple((x.tensor, tuple(x.where.items()), x.is_free) for x in (*operands, result))
        if key not in self._cache:
            self._cache[key] = costs.shard_einsum(operands, result, self.mesh, self.rates)
        return self._cache[key]

    def where(self, tensor: Tensor, kind: str = "") -> costs.Sharding:
        """Returns a tensor's sharding by the table of its own kind, or of another kind."""
        kind = kind or ("weights" if tensor.is_weight else "activations")
        shape = None if kind == "activations" else tensor.shape
        split = self._partitioning.split(tensor.layout, kind, unsplit=tensor.unsplit, shape=shape)
        several = {axis for axis, size in self.mesh.axes if size > 1}
        return {axis: x for axis, x in costs.sharding_of(tensor, split).items() if axis in several}

    def bytes(self, tensor: Tensor) -> int:
        """Returns the bytes of one device's shard."""
        return costs.local_bytes(tensor, self.where(tensor), self.mesh)

    def stored_bytes(self, tensor: Tensor, kind: str) -> int:
        """Returns the bytes of a shard between steps, where uneven dimensions are replicated."""
        where = self.where(tensor, kind)
        sizes = dict(zip(tensor.layout, tensor.shape, strict=True))
        stored = {
            axis: letter
            for axis, letter in where.items()
            if sizes[letter] % costs.num_shards(letter, where, self.mesh) == 0
        }
        return costs.local_bytes(tensor, stored, self.mesh)

    def add_calls(
        self, cost: costs.Cost, calls: list[costs.Collective], phase: str, times: int
    ) -> None:
        """Adds collectives that run `times` times in a step."""
        for call in calls:
            cost.calls.append((call, phase, times))
            cost.communication_seconds += times * self.seconds(call)

    def seconds(self, call: costs.Collective) -> float:
        """Returns the time of a collective."""
        return self.rates.collective_seconds(call.kind, call.bytes, call.axes, self.mesh)


def term_cost(
    term: CostTerm, sharding: StrategySharding, saving: Saving, micro_batches: int = 1
) -> TermCost:
    """Returns a term's cost in a step."""
    total, policy = TermCost(), saving.policy
    if isinstance(term.what, Einsum):
        _EinsumCost(term.what, term.count, sharding, policy, total).add()
    elif isinstance(term.what, Weight):
        is_accumulated = micro_batches > 1
        _add_weight(total, term.what, term.count, sharding, is_accumulated, saving.offloads_moments)
        return total
    else:
        total.cost = flow_cost(term.what, term.count, sharding, sharding, policy)
    total.cost = total.cost.repeated(micro_batches)
    total.cost.add(total.hoisted)
    return total


def flow_cost(
    flow: Flow, count: int, source: StrategySharding, target: StrategySharding, policy: str
) -> costs.Cost:
    """Returns the cost of passing `count` equal tensors, and their gradients, between layers."""
    cost, times = costs.Cost(), flow.times * count
    before, after = source.where(flow.source), target.where(flow.target)
    forward = costs.resharding(flow.source, before, after, source.mesh)
    backward = costs.resharding(flow.target, after, before, source.mesh)
    phases = [(costs.FORWARD, forward), (costs.BACKWARD, backward)]
    if flow.unit and policy != remat_policy.NONE:
        phases.append((costs.REMATERIALIZED, forward))
    for phase, calls in phases:
        if flow.rows is None:
            source.add_calls(cost, calls, phase, times)
        else:
            returns = flow.source.layout.startswith("E") != (phase == costs.BACKWARD)
            _add_exchanges(cost, calls, flow.rows, returns, source, phase, times)
    return cost


def _add_exchanges(
    cost: costs.Cost,
    calls: Sequence[costs.Collective],
    rows: ExpertRows,
    returns: bool,
    sharding: StrategySharding,
    phase: str,
    times: int,
) -> None:
    """Adds collectives, and in place of each all-to-all the fastest exchange of the rows."""
    for call in calls:
        if call.kind != "all-to-all":
            sharding.add_calls(cost, [call], phase, times)
            continue
        devices = sharding.mesh.parts(call.axes)
        platform = sharding.rates.platform
        names = possible_exchanges(platform, devices, rows)
        found = {name: exchanged(name, call, rows, devices, returns, platform) for name in names}
        seconds = {name: sharding.seconds(each) for name, each in found.items()}
        fastest = min(names, key=seconds.__getitem__)
        sharding.add_calls(cost, [found[fastest]], phase, times)
        cost.workspace = max(cost.workspace, found[fastest].bytes)
        cost.exchanges.update({name: times * each for name, each in seconds.items()})


def _add_weight(
    total: TermCost,
    weight: Weight,
    count: int,
    sharding: StrategySharding,
    is_accumulated: bool,
    offloads_moments: bool,
) -> None:
    """Adds memory and update of equal weights.

    The gradient of a weight that is no operand of an einsum is also reduced over the batch. No
    computation hides copies of offloaded moments. The moments of one weight come while the moments
    of the weight before go.
    """
    cost, tensor, mesh = total.cost, weight.tensor, sharding.mesh
    where, update = sharding.where(tensor, "weights"), sharding.where(tensor, "moments")
    moments = sum(sharding.stored_bytes(moment, "moments") for moment in weight.moments)
    gradient = costs.local_bytes(tensor, where, mesh)
    if is_accumulated:
        cost.accumulated += count * _FLOAT32 * costs.local_elements(tensor, where, mesh)
    cost.weights += count * sharding.stored_bytes(tensor, "weights")
    if offloads_moments:
        cost.host_seconds += sharding.rates.host_seconds(count * moments)
    else:
        cost.moments += count * moments
    cost.gradients += count * gradient
    if weight.times > 1:
        cost.stacked_gradients += count * gradient
    # The update reads weight and gradient, writes the weight, and reads and writes the moments.
    traffic = 3 * costs.local_bytes(tensor, update, mesh) + 2 * moments
    cost.compute_seconds += count * sharding.rates.memory_seconds(traffic)
    for call in costs.resharding(tensor, update, where, mesh):
        total.summed[call.kind, call.axes, 1, costs.OPTIMIZER] += count * call.bytes
    rows = sharding.strategy.activations.get("B", ())
    rows = tuple(axis for axis in mesh.names if axis in rows)
    if rows and not weight.is_computed_with:
        kind = "reduce-scatter" if any(axis in where for axis in rows) else "all-reduce"
        key = kind, rows, weight.times, costs.BACKWARD
        total.summed[key] += count * tensor.bytes // weight.times


class _EinsumCost:
    """Adds up the cost of `count` equal einsums and of their gradients."""

    def __init__(
        self, einsum: Einsum, count: int, sharding: StrategySharding, policy: str, total: TermCost
    ):
        self._einsum, self._count, self._sharding = einsum, count, sharding
        self._cost, self._hoisted, self._summed = total.cost, total.hoisted, total.summed
        self._times = einsum.times * count
        self._is_recomputed = policy != remat_policy.NONE and bool(einsum.unit)
        self._is_offloaded = remat_policy.is_offloaded(policy)
        left, right = (operand.layout for operand in einsum.operands)
        self._is_saved = remat_policy.POLICIES[policy](left, right, einsum.result.layout)

    def add(self) -> None:
        """Adds the forward einsum, its recomputation and its gradients."""
        axes = self._exchanged_axes()
        if axes:
            self._add_exchange(axes)
            return
        operands = self._operands()
        result = self._at(self._einsum.result)
        forward = self._sharding.shard_einsum(operands, result)
        self._add_execution(forward, costs.FORWARD)
        self._cost.workspace = 2 * forward.bytes
        self._add_gathers(self._whole_weights())
        if self._einsum.result.is_virtual:
            # The backward pass computes the logits again, in all its kernels.
            self._add_computing(forward)
        self._add_gathers([call for n, call in forward.calls if n in forward.gathers])
        if self._is_recomputed and not self._is_saved:
            self._add_execution(forward, costs.REMATERIALIZED)
        for number, target in enumerate(operands):
            if not target.is_free:
                self._add_gradient(operands[1 - number], target, result)
        self._add_saved()

    def _add_saved(self) -> None:
        """Adds the tensors saved for the backward pass, and those recomputed in it."""
        saved = [self._sharding.bytes(tensor) for tensor in self._einsum.saved]
        if not self._is_recomputed:
            self._cost.saved += sum(saved) * self._times
            return
        self._cost.recomputed = sum(saved)
        kept = saved[0] if self._einsum.begins_unit and saved else 0
        if self._is_saved:
            kept += self._sharding.bytes(self._einsum.result)
        if self._is_offloaded:
            self._cost.hosted += kept * self._times
        else:
            self._cost.saved += kept * self._times

    def _exchanged_axes(self) -> tuple[str, ...]:
        """Returns axes along which a lookup exchanges parts of rows, as in layers/embedding.py."""
        einsum = self._einsum
        if not einsum.is_lookup or einsum.is_tied:
            return ()
        table, result = einsum.operands[1], einsum.result
        stored, tokens = self._sharding.where(table), self._sharding.where(result)
        rows, _ = table.layout
        if not stored or rows in stored.values() or len(result.layout) != 3:
            return ()
        if any(tokens.get(axis) != result.layout[0] for axis in stored):
            return ()
        count = costs.local_elements(result, tokens, self._sharding.mesh) // result.shape[-1]
        return tuple(stored) if exchanges_rows(count, table.shape[0]) else ()

    def _add_exchange(self, axes: tuple[str, ...]) -> None:
        """Adds a lookup whose rows travel, forward and backward."""
        result = self._einsum.result
        local = self._sharding.bytes(result)
        for phase in (costs.FORWARD, costs.BACKWARD):
            call = costs.Collective("all-to-all", axes, local)
            self._sharding.add_calls(self._cost, [call], phase, self._times)
            seconds = self._sharding.rates.memory_seconds(2 * local)
            self._cost.compute_seconds += seconds * self._times
        self._cost.workspace = 2 * local
        self._add_saved()

    def _operands(self) -> tuple[costs.ShardedTensor, costs.ShardedTensor]:
        """Returns the operands; a lookup first reshards its table."""
        left, right = self._einsum.operands
        if not self._einsum.is_lookup:
            return self._at(left), self._at(right)
        table = self._sharding.where(right, "activations")
        gathers = costs.resharding(right, self._sharding.where(right), table, self._sharding.mesh)
        cost = self._cost if self._einsum.times > 1 else self._hoisted
        self._sharding.add_calls(cost, gathers, costs.FORWARD, self._times)
        return costs.ShardedTensor(left, {}, is_free=True), costs.ShardedTensor(right, table)

    def _at(self, tensor: Tensor) -> costs.ShardedTensor:
        return costs.ShardedTensor(tensor, self._where(tensor))

    def _where(self, tensor: Tensor) -> dict[str, str]:
        """Returns the sharding that a tensor is computed with.

        A manual region splits groups, and experts over axes that split groups, too.
        """
        where = dict(self._sharding.where(tensor))
        if not self._einsum.is_dropless:
            return where
        groups = self._sharding.strategy.activations.get("G", ())
        return {axis: x for axis, x in where.items() if axis in groups and x in "GE"}

    def _whole_weights(self) -> list[costs.Collective]:
        """Returns the all-gathers of weights that a manual region reads whole."""
        sharding = self._sharding
        return [
            call
            for x in self._einsum.operands
            if x.is_weight and self._einsum.is_dropless
            for call in costs.resharding(x, sharding.where(x), self._where(x), sharding.mesh)
        ]

    def _add_gathers(self, calls: list[costs.Collective]) -> None:
        """Adds all-gathers of weights.

        In loops and with recomputation they run in both passes. Elsewhere their result is saved for
        all micro-batches.
        """
        if self._is_recomputed or self._einsum.times > 1:
            for phase in (costs.FORWARD, costs.BACKWARD):
                self._sharding.add_calls(self._cost, calls, phase, self._times)
        else:
            self._sharding.add_calls(self._hoisted, calls, costs.FORWARD, self._times)
            self._hoisted.saved += self._times * sum(call.bytes for call in calls)

    def _add_execution(self, einsum: costs.ShardedEinsum, phase: str) -> None:
        """Adds a forward einsum without the all-gathers of its weights."""
        self._add_computing(einsum)
        moved = [call for number, call in einsum.calls if number not in einsum.gathers]
        self._sharding.add_calls(self._cost, moved, phase, self._times)

    def _add_gradient(
        self, other: costs.ShardedTensor, target: costs.ShardedTensor, result: costs.ShardedTensor
    ) -> None:
        """Adds the einsum of the result's gradient and the other operand."""
        is_weight = target.tensor.is_weight
        if is_weight:
            target = self._gradient_of(target.tensor, other)
        gradient = self._sharding.shard_einsum((result, other), target)
        self._add_computing(gradient)
        for number, call in gradient.calls:
            if number in gradient.gathers:
                continue
            if number != costs.RESULT or not is_weight:
                self._sharding.add_calls(self._cost, [call], costs.BACKWARD, self._times)
            elif not self._einsum.is_tied:
                key = call.kind, call.axes, self._einsum.times, costs.BACKWARD
                self._summed[key] += call.bytes * self._count

    def _gradient_of(self, weight: Tensor, other: costs.ShardedTensor) -> costs.ShardedTensor:
        """Returns a weight's gradient. Regions scatter it where their tokens are split."""
        where = self._sharding.where(weight)
        if self._einsum.is_dropless:
            where = {axis: x for axis, x in where.items() if axis in other.where}
        return costs.ShardedTensor(weight, where)

    def _add_computing(self, einsum: costs.ShardedEinsum) -> None:
        dtype, flops = self._einsum.result.dtype, round(einsum.flops * self._einsum.share)
        self._cost.flops += flops * self._times
        seconds = self._sharding.rates.matmul_seconds(flops, einsum.bytes, dtype)
        self._cost.compute_seconds += seconds * self._times


def _used_saving(what: Einsum | Flow | Weight, saving: Saving) -> tuple[bool, ...]:
    """Returns what the cost of a term depends on. Savings that agree in it cost the same."""
    if isinstance(what, Weight):
        return (saving.offloads_moments,)
    if not what.unit or saving.policy == remat_policy.NONE:
        return ()
    if isinstance(what, Flow):
        return (True,)
    left, right = (operand.layout for operand in what.operands)
    is_saved = remat_policy.POLICIES[saving.policy](left, right, what.result.layout)
    return is_saved, remat_policy.is_offloaded(saving.policy)


class CostModel:
    """Costs on one mesh, with one choice of what is saved where."""

    def __init__(
        self, mesh: Mesh, rates: costs.Rates, saving: Saving = SAVE_ALL, micro_batches: int = 1
    ):
        self.mesh, self.rates, self.saving = mesh, rates, saving
        self.micro_batches = micro_batches
        self._term_costs: dict[tuple, TermCost] = {}
        self._sharded_einsums: dict[tuple, costs.ShardedEinsum] = {}

    def under(self, saving: Saving) -> CostModel:
        """Returns a model with another saving that shares this one's cache."""
        other = copy.copy(self)
        other.saving = saving
        return other

    def cost(self, layer_groups: LayerGroups, chosen: list[Strategy]) -> costs.Cost:
        """Returns the cost of a step that shards each group by its strategy."""
        total = costs.Cost()
        for group, strategy in zip(layer_groups.groups, chosen, strict=True):
            total.add(self.group_cost(group, strategy))
        for (source, target), flows in layer_groups.between.items():
            for flow in flows:
                total.add(self.flow_cost(flow, chosen[source], chosen[target]))
        return total

    def group_cost(self, group: LayerGroup, strategy: Strategy) -> costs.Cost:
        """Returns the cost of a group's layers."""
        total, summed = costs.Cost(), collections.Counter()
        # The recomputed tensors of one unit are alive together. Two units are never recomputed at
        # the same time.
        recomputed: collections.Counter[int] = collections.Counter()
        tables = {kind: strategy.table(kind) for kind in strategies.KINDS}
        for term in cost_terms(group):
            part = self._term_cost(term, strategy, tables)
            total.add(part.cost)
            summed.update(part.summed)
            recomputed[term.unit] += term.per_unit * part.cost.recomputed
        total.recomputed = max(recomputed.values(), default=0)
        self._add_summed(total, summed, strategy)
        # Activations go to the host and come back beside the computation of the group.
        copies = 2 * self.rates.host_seconds(total.hosted) * self.micro_batches
        total.host_seconds += max(0.0, copies - total.compute_seconds)
        return total

    def flow_cost(self, flow: Flow, source: Strategy, target: Strategy) -> costs.Cost:
        """Returns the cost of a tensor that one group passes to another."""
        shardings = self._sharding(source), self._sharding(target)
        cost = flow_cost(flow, 1, *shardings, self.saving.policy)
        return cost.repeated(self.micro_batches)

    def _add_summed(self, cost: costs.Cost, summed: Summed, strategy: Strategy) -> None:
        sharding = self._sharding(strategy)
        for (kind, axes, times, phase), bytes in summed.items():
            # Gradients of whole weights are reduced once. Those that are split like their weights
            # are reduced by every micro-batch, since no device holds a whole sum of them.
            is_repeated = phase == costs.BACKWARD and kind != "all-reduce"
            repeats = self.micro_batches if is_repeated else 1
            sharding.add_calls(cost, [costs.Collective(kind, axes, bytes)], phase, times * repeats)

    def _term_cost(
        self, term: CostTerm, strategy: Strategy, tables: Mapping[str, strategies.Table]
    ) -> TermCost:
        used = _used_saving(term.what, self.saving)
        key = term, used, *[tables[kind].get(x, ()) for kind, x in term.letters]
        if key not in self._term_costs:
            sharding = self._sharding(strategy)
            self._term_costs[key] = term_cost(term, sharding, self.saving, self.micro_batches)
        return self._term_costs[key]

    def _sharding(self, strategy: Strategy) -> StrategySharding:
        return StrategySharding(self.mesh, self.rates, strategy, self._sharded_einsums)
