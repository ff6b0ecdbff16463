"""What a plan says of one layer with experts: times and weights."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.planning.loads.layers import ExpertLayer
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.training.optim.optimizer import SCOPE as OPTIMIZER_PHASE

_EXPERTS = "experts"
_EXCHANGE = "all-to-all"
_EXPERT_LETTER = "E"


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """The plan's estimates for one layer with experts, of one device in one step.

    Attributes:
      experts: time of the experts' arithmetic, forward, rematerialized and backward.
      exchange: time of the all-to-alls between groups and experts.
      bytes_per_expert: weights of one expert.
    """

    experts: float
    exchange: float
    bytes_per_expert: int

    @classmethod
    def of(cls, plan: Plan, layer: ExpertLayer) -> LayerSeconds:
        """Returns what a plan says of a layer. Layers of one loop have equal shares of its time."""
        scope = f"{layer.scope}/{_EXPERTS}"
        rows = [row for row in plan.layers if _is_in(row.layer, scope)]
        # Weights that are gathered, and gradients that are summed, do not depend on the rows.
        others = [row for row in plan.collectives if _is_in(row.layer, scope)]
        experts = sum(row.seconds for row in rows if row.phase != OPTIMIZER_PHASE)
        experts -= sum(row.seconds for row in others if row.phase != OPTIMIZER_PHASE)
        exchange = sum(
            row.seconds
            for row in plan.collectives
            if row.kind.startswith(_EXCHANGE) and _is_in(row.layer, layer.scope)
        )
        weights = sum(
            row.bytes
            for row in plan.tensors
            if row.kind == "weights" and _is_in(row.layer, scope) and _EXPERT_LETTER in row.layout
        )
        return cls(
            max(experts, 0.0) / layer.times,
            exchange / layer.times,
            weights // (layer.times * layer.num_experts),
        )


def _is_in(layer: str, scope: str) -> bool:
    return layer == scope or layer.startswith(f"{scope}/")
