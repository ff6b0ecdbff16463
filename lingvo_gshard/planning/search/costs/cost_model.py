"""The cost model: what groups of layers cost, split over a mesh as strategies say.

A product's gradient is two products. Products and collectives take turns, none hides another.
Elementwise operations are left out, but for what the optimizer reads and writes.
"""

from __future__ import annotations

import collections
import copy

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.planning.search.costs.cost import Cost
from lingvo_gshard.planning.search.costs.part_costs import (
    PartCost,
    Placement,
    Summed,
    flow_cost,
    part_cost,
)
from lingvo_gshard.planning.search.costs.rates import Rates
from lingvo_gshard.planning.search.groups import Group, Grouped
from lingvo_gshard.planning.search.layouts import Call
from lingvo_gshard.planning.search.traced.graph import Flow
from lingvo_gshard.planning.search.traced.parts import Part, Weight, parts
from lingvo_gshard.planning.search.traced.products import Execution
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import KINDS, Strategy


class CostModel:
    """Costs on one mesh, under one rematerialization policy of core/autodiff/remat_policy.py."""

    def __init__(self, mesh: Mesh, rates: Rates, policy: str = remat_policy.NONE):
        remat_policy.check(policy, "rematerialize")
        self.mesh, self.rates, self.policy = mesh, rates, policy
        self._known: dict[tuple, PartCost] = {}
        self._executions: dict[tuple, Execution] = {}

    def under(self, policy: str) -> CostModel:
        """Returns a model of another policy, which knows what this one has worked out."""
        remat_policy.check(policy, "rematerialize")
        other = copy.copy(self)
        other.policy = policy
        return other

    def cost(self, grouped: Grouped, strategies: list[Strategy]) -> Cost:
        """Returns the cost of a step with a strategy for each group."""
        total = Cost()
        for group, strategy in zip(grouped.groups, strategies, strict=True):
            total.add(self.group_cost(group, strategy))
        for (source, target), flows in grouped.between.items():
            for flow in flows:
                total.add(self.flow_cost(flow, strategies[source], strategies[target]))
        return total

    def group_cost(self, group: Group, strategy: Strategy) -> Cost:
        """Returns the cost of a group's layers."""
        total, summed = Cost(), collections.Counter()
        # What is computed again of a unit is there at one time, of different units it is not.
        again: dict[int, int] = {}
        for part in parts(group):
            found = self._part_cost(part, strategy)
            total.add(found.cost)
            for key, bytes in found.summed.items():
                summed[key] += bytes
            again[part.unit] = again.get(part.unit, 0) + part.per_unit * found.cost.again
        total.again = max(again.values(), default=0)
        self._add_summed(total, summed, strategy)
        return total

    def flow_cost(self, flow: Flow, source: Strategy, target: Strategy) -> Cost:
        """Returns the cost of a tensor that one group hands to another."""
        return flow_cost(flow, 1, self._placement(source), self._placement(target), self.policy)

    def _add_summed(self, cost: Cost, summed: Summed, strategy: Strategy) -> None:
        placement = self._placement(strategy)
        for (kind, axes, times, phase), bytes in summed.items():
            placement.add_calls(cost, [Call(kind, axes, bytes)], phase, times)

    def _part_cost(self, part: Part, strategy: Strategy) -> PartCost:
        tables = {kind: strategy.table(kind) for kind in KINDS}
        policy = "" if isinstance(part.what, Weight) else self.policy
        key = part, policy, *[tables[kind].get(x, ()) for kind, x in part.letters]
        if key not in self._known:
            self._known[key] = part_cost(part, self._placement(strategy), self.policy)
        return self._known[key]

    def _placement(self, strategy: Strategy) -> Placement:
        return Placement(self.mesh, self.rates, strategy, self._executions)
