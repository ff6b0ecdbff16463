"""CostModel: the cost of groups of layers that strategies shard over a mesh.

The gradient of an einsum is two einsums. Einsums and collectives do not overlap. Of elementwise
operations only the optimizer's memory traffic counts.
"""

from __future__ import annotations

import collections
import copy

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.planning.search.costs.cost import Cost
from lingvo_gshard.planning.search.costs.rates import Rates
from lingvo_gshard.planning.search.costs.term_costs import (
    Placement,
    Summed,
    TermCost,
    flow_cost,
    term_cost,
)
from lingvo_gshard.planning.search.costs.terms import CostTerm, Weight, cost_terms
from lingvo_gshard.planning.search.groups import LayerGroup, LayerGroups
from lingvo_gshard.planning.search.resharding import Collective
from lingvo_gshard.planning.search.sharded_einsum import ShardedEinsum
from lingvo_gshard.planning.search.trace.graph import Flow
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import KINDS, Strategy


class CostModel:
    """Costs on one mesh, under one rematerialization policy of core/autodiff/remat_policy.py."""

    def __init__(self, mesh: Mesh, rates: Rates, policy: str = remat_policy.NONE):
        remat_policy.check(policy, "rematerialize")
        self.mesh, self.rates, self.policy = mesh, rates, policy
        self._term_costs: dict[tuple, TermCost] = {}
        self._sharded_einsums: dict[tuple, ShardedEinsum] = {}

    def under(self, policy: str) -> CostModel:
        """Returns a model with another policy that shares this one's cache."""
        remat_policy.check(policy, "rematerialize")
        other = copy.copy(self)
        other.policy = policy
        return other

    def cost(self, layer_groups: LayerGroups, strategies: list[Strategy]) -> Cost:
        """Returns the cost of a step that shards each group by its strategy."""
        total = Cost()
        for group, strategy in zip(layer_groups.groups, strategies, strict=True):
            total.add(self.group_cost(group, strategy))
        for (source, target), flows in layer_groups.between.items():
            for flow in flows:
                total.add(self.flow_cost(flow, strategies[source], strategies[target]))
        return total

    def group_cost(self, group: LayerGroup, strategy: Strategy) -> Cost:
        """Returns the cost of a group's layers."""
        total, summed = Cost(), collections.Counter()
        # The recomputed tensors of one unit are alive together, those of different units are not.
        recomputed: dict[int, int] = {}
        for term in cost_terms(group):
            part = self._term_cost(term, strategy)
            total.add(part.cost)
            for key, bytes in part.summed.items():
                summed[key] += bytes
            recomputed[term.unit] = (
                recomputed.get(term.unit, 0) + term.per_unit * part.cost.recomputed
            )
        total.recomputed = max(recomputed.values(), default=0)
        self._add_summed(total, summed, strategy)
        return total

    def flow_cost(self, flow: Flow, source: Strategy, target: Strategy) -> Cost:
        """Returns the cost of a tensor that one group passes to another."""
        return flow_cost(flow, 1, self._placement(source), self._placement(target), self.policy)

    def _add_summed(self, cost: Cost, summed: Summed, strategy: Strategy) -> None:
        placement = self._placement(strategy)
        for (kind, axes, times, phase), bytes in summed.items():
            placement.add_calls(cost, [Collective(kind, axes, bytes)], phase, times)

    def _term_cost(self, term: CostTerm, strategy: Strategy) -> TermCost:
        tables = {kind: strategy.table(kind) for kind in KINDS}
        policy = "" if isinstance(term.what, Weight) else self.policy
        key = term, policy, *[tables[kind].get(x, ()) for kind, x in term.letters]
        if key not in self._term_costs:
            self._term_costs[key] = term_cost(term, self._placement(strategy), self.policy)
        return self._term_costs[key]

    def _placement(self, strategy: Strategy) -> Placement:
        return Placement(self.mesh, self.rates, strategy, self._sharded_einsums)
