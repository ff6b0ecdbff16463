"""What one part of a group of layers costs, split as a strategy says."""

from __future__ import annotations

import collections
import dataclasses

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.planning.search.costs.cost import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Cost,
    REMATERIALizED,
)
from lingvo_gshard.planning.search.costs.rates import Rates
from lingvo_gshard.planning.search.layouts import (
    Call,
    Placed,
    changes,
    local_bytes,
    partitioning,
    parts_of,
)
from lingvo_gshard.planning.search.traced.graph import Flow, Product, Tensor
from lingvo_gshard.planning.search.traced.parts import Part, Weight
from lingvo_gshard.planning.search.traced.products import RESULT, Execution, Operand, execute
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.strategies import Strategy

# (kind, axes, times, phase) -> bytes: of gradients and updates of weights, moved together.
Summed = collections.Counter[tuple[str, tuple[str, ...], int, str]]


@dataclasses.dataclass
class PartCost:
    """A part's cost, but for what is moved together with other parts' gradients."""

    cost: Cost = dataclasses.field(default_factory=Cost)
    summed: Summed = dataclasses.field(default_factory=collections.Counter)


class Placement:
    """Where tensors lie under one strategy on one mesh, and how products are then computed.

    known: executions that were worked out before.
    """

    def __init__(self, mesh: Mesh, rates: Rates, strategy: Strategy, known: dict[tuple, Execution]):
        self.mesh, self.rates, self.strategy = mesh, rates, strategy
        self._partitioning, self._known = Partitioning(mesh, strategy), known

    def execute(self, operands: tuple[Operand, Operand], result: Operand) -> Execution:
        """Returns how a product is computed."""
        key = tuple((x.tensor, tuple(x.where.items()), x.is_free) for x in (*operands, result))
        if key not in self._known:
            self._known[key] = execute(operands, result, self.mesh, self.rates)
        return self._known[key]

    def where(self, tensor: Tensor, kind: str = "") -> Placed:
        """Returns the letter of the tensor that each axis splits; kind: if not the tensor's own."""
        kind = kind or ("weights" if tensor.is_weight else "activations")
        split = self._partitioning.split(tensor.layout, kind, unsplit=tensor.unsplit)
        several = {axis for axis, size in self.mesh.axes if size > 1}
        return {axis: x for axis, x in partitioning(tensor, split).items() if axis in several}

    def bytes(self, tensor: Tensor, kind: str = "") -> int:
        """Returns the bytes of one device's part."""
        return local_bytes(tensor, self.where(tensor, kind), self.mesh)

    def stored_bytes(self, tensor: Tensor, kind: str) -> int:
        """Returns the bytes of a part between steps: whole where it does not divide."""
        where = self.where(tensor, kind)
        sizes = dict(zip(tensor.layout, tensor.shape, strict=True))
        stored = {
            axis: letter
            for axis, letter in where.items()
            if sizes[letter] % parts_of(letter, where, self.mesh) == 0
        }
        return local_bytes(tensor, stored, self.mesh)

    def add_calls(self, cost: Cost, calls: list[Call], phase: str, times: int) -> None:
        """Adds collectives that run so often."""
        for call in calls:
            cost.calls.append((call, phase, times))
            seconds = self.rates.collective_seconds(call.kind, call.bytes, call.axes, self.mesh)
            cost.communication_seconds += times * seconds


def part_cost(part: Part, placement: Placement, policy: str) -> PartCost:
    """Returns a part's cost under a rematerialization policy."""
    found = PartCost()
    if isinstance(part.what, Product):
        _ProductCost(part.what, part.count, placement, policy, found).add()
    elif isinstance(part.what, Weight):
        _add_weight(found, part.what, part.count, placement)
    else:
        found.cost = flow_cost(part.what, part.count, placement, placement, policy)
    return found


def flow_cost(flow: Flow, count: int, source: Placement, target: Placement, policy: str) -> Cost:
    """Returns the cost of like tensors that layers hand to others, and of their gradients."""
    cost, times = Cost(), flow.times * count
    before, after = source.where(flow.source), target.where(flow.target)
    forward = changes(flow.source, before, after, source.mesh)
    source.add_calls(cost, forward, FORWARD, times)
    source.add_calls(cost, changes(flow.target, after, before, source.mesh), BACKWARD, times)
    if flow.unit and policy != remat_policy.NONE:
        source.add_calls(cost, forward, REMATERIALizED, times)
    return cost


def _add_weight(found: PartCost, weight: Weight, count: int, placement: Placement) -> None:
    """Adds memory and update of like weights, and the sum of gradients that no product leaves."""
    cost, tensor, mesh = found.cost, weight.tensor, placement.mesh
    where, update = placement.where(tensor, "weights"), placement.where(tensor, "moments")
    moments = sum(placement.stored_bytes(moment, "moments") for moment in weight.moments)
    gradient = local_bytes(tensor, where, mesh)
    cost.weights += count * placement.stored_bytes(tensor, "weights")
    cost.moments += count * moments
    cost.gradients += count * gradient
    if weight.times > 1:
        cost.stacked_gradients += count * gradient
    # Weight and gradient are read, the weight is written, and moments are both.
    passed = 3 * local_bytes(tensor, update, mesh) + 2 * moments
    cost.compute_seconds += count * placement.rates.memory_seconds(passed)
    for call in changes(tensor, update, where, mesh):
        found.summed[call.kind, call.axes, 1, OPTIMIZER] += count * call.bytes
    rows = placement.strategy.activations.get("B", ())
    rows = tuple(axis for axis in mesh.names if axis in rows)
    if rows and not weight.is_computed_with:
        kind = "reduce-scatter" if any(axis in where for axis in rows) else "all-reduce"
        key = kind, rows, weight.times, BACKWARD
        found.summed[key] += count * tensor.bytes // weight.times


class _ProductCost:
    """Adds up what like products, `count` of them, and their gradients cost."""

    def __init__(
        self, product: Product, count: int, placement: Placement, policy: str, found: PartCost
    ):
        self._product, self._count, self._placement = product, count, placement
        self._cost, self._summed = found.cost, found.summed
        self._times = product.times * count
        self._is_again = policy != remat_policy.NONE and bool(product.unit)
        layouts = [operand.layout for operand in product.operands]
        self._is_kept = remat_policy.POLICIES[policy](*layouts, product.result.layout)

    def add(self) -> None:
        """Adds the product forward, what of it is computed again, and its gradients."""
        operands = self._operands()
        result = self._at(self._product.result)
        forward = self._placement.execute(operands, result)
        self._add_execution(forward, FORWARD)
        self._cost.working = 2 * forward.bytes
        self._add_gathers([call for n, call in forward.calls if n in forward.gathers])
        if self._is_again and not self._is_kept:
            self._add_execution(forward, REMATERIALizED)
        for number, target in enumerate(operands):
            if not target.is_free:
                self._add_gradient(operands[1 - number], target, result)
        self._add_kept()

    def _add_kept(self) -> None:
        """What is in memory between the passes, and what is there again in the backward pass."""
        saved = [self._placement.bytes(tensor) for tensor in self._product.saved]
        if not self._is_again:
            self._cost.kept += sum(saved) * self._times
            return
        self._cost.again = sum(saved)
        if self._product.begins_unit and saved:
            self._cost.kept += saved[0] * self._times
        if self._is_kept:
            self._cost.kept += self._placement.bytes(self._product.result) * self._times

    def _operands(self) -> tuple[Operand, Operand]:
        """The operands; a table is first brought to where lookups want it."""
        left, right = self._product.operands
        if not self._product.is_lookup:
            return self._at(left), self._at(right)
        table = self._placement.where(right, "activations")
        gathers = changes(right, self._placement.where(right), table, self._placement.mesh)
        self._placement.add_calls(self._cost, gathers, FORWARD, self._times)
        return Operand(left, {}, is_free=True), Operand(right, table)

    def _at(self, tensor: Tensor) -> Operand:
        return Operand(tensor, self._placement.where(tensor))

    def _add_gathers(self, calls: list[Call]) -> None:
        """Weights that are brought together: in a loop, or to compute again, twice; else kept."""
        self._placement.add_calls(self._cost, calls, FORWARD, self._times)
        if self._is_again or self._product.times > 1:
            self._placement.add_calls(self._cost, calls, BACKWARD, self._times)
        else:
            self._cost.kept += self._times * sum(call.bytes for call in calls)

    def _add_execution(self, found: Execution, phase: str) -> None:
        """Adds a forward product, but for the gathering of its weights."""
        self._add_computing(found)
        moved = [call for number, call in found.calls if number not in found.gathers]
        self._placement.add_calls(self._cost, moved, phase, self._times)

    def _add_gradient(self, other: Operand, target: Operand, result: Operand) -> None:
        """Adds the product of the result's gradient and the other operand."""
        is_weight = target.tensor.is_weight
        if is_weight:
            target = self._at(target.tensor)
        found = self._placement.execute((result, other), target)
        self._add_computing(found)
        for number, call in found.calls:
            if number in found.gathers:
                continue
            if number != RESULT or not is_weight:
                self._placement.add_calls(self._cost, [call], BACKWARD, self._times)
            elif not self._product.is_tied:
                key = call.kind, call.axes, self._product.times, BACKWARD
                self._summed[key] += call.bytes * self._count

    def _add_computing(self, found: Execution) -> None:
        dtype = self._product.result.dtype
        self._cost.flops += found.flops * self._times
        seconds = self._placement.rates.product_seconds(found.flops, found.bytes, dtype)
        self._cost.compute_seconds += seconds * self._times
