"""Finds collapsed routers and dead experts in the records of watched routers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.training.run.routers.records import RouterRecord

_MOST_WARNINGS = 20
_MOST_EXPERTS = 8
_ADVICE = (
    "try a z_loss_weight that keeps its logits small, a router with a selection bias "
    "(SigmoidRouter), or fewer experts"
)


@dataclasses.dataclass
class _State:
    """The history of one layer.

    Attributes:
      idle_since: experts without a token in the latest watched steps -> the first of these steps.
      idle_steps: the same experts -> the number of these steps.
      told: experts whose death was told.
      collapsed_since: the first of the latest watched steps in which the router was collapsed.
    """

    idle_since: dict[int, int] = dataclasses.field(default_factory=dict)
    idle_steps: dict[int, int] = dataclasses.field(default_factory=dict)
    told: set[int] = dataclasses.field(default_factory=set)
    collapsed_since: int | None = None


class Verdicts:
    """Judges the records of a run, in the order of steps."""

    def __init__(self, params: Params, layers: Mapping[str, MixtureOfExperts]):
        """Begins with nothing known.

        Args:
          params: `run.routers`.
          layers: the watched layers by path.
        """
        self._p, self._layers = params, layers
        self._states: dict[str, _State] = {}
        self._warnings = 0
        self._advised: set[str] = set()

    def add(self, record: RouterRecord) -> tuple[RouterRecord, list[str]]:
        """Returns the record with its dead experts, and lines to show."""
        state = self._states.setdefault(record.layer, _State())
        idle = [expert for expert, count in enumerate(record.kept) if not count]
        state.idle_since = {e: state.idle_since.get(e, record.step) for e in idle}
        state.idle_steps = {e: state.idle_steps.get(e, 0) + 1 for e in idle}
        dead = {e: s for e, s in state.idle_since.items() if state.idle_steps[e] >= self._p.window}
        lines = [*self._collapse(state, record), *self._deaths(state, record, dead)]
        return msgspec.structs.replace(record, dead_since=dead), lines

    def summary(self) -> list[str]:
        """Returns a line for each router that is collapsed or has dead experts at the end."""
        lines = []
        for layer, state in self._states.items():
            dead = [e for e, count in state.idle_steps.items() if count >= self._p.window]
            if state.collapsed_since is not None:
                lines.append(f"  {layer}  collapsed since step {state.collapsed_since:,}")
            if dead:
                since = min(state.idle_since[e] for e in dead)
                lines.append(f"  {layer}  dead {_experts(dead)}, the longest since step {since:,}")
        return ["Routers at the end:", *lines] if lines else []

    def _collapse(self, state: _State, record: RouterRecord) -> list[str]:
        if concentration(record) <= self._p.collapse:
            before, state.collapsed_since = state.collapsed_since, None
            if before is None:
                return []
            return self._told(
                f"step {record.step:,}: the router of {record.layer} is no longer collapsed, as it "
                f"was since step {before:,}"
            )
        if state.collapsed_since is not None:
            return []
        state.collapsed_since = record.step
        expert, share = record.busiest
        line = (
            f"Warning: step {record.step:,}: the router of {record.layer} has collapsed: expert "
            f"{expert} gets {share:.1%} of the choices; an even share is "
            f"{1 / record.num_experts:.1%}"
        )
        return self._told(line, record.layer)

    def _deaths(self, state: _State, record: RouterRecord, dead: dict[int, int]) -> list[str]:
        new = sorted(set(dead) - state.told)
        state.told = set(dead)
        lines = []
        for since in sorted({dead[e] for e in new}):
            experts = [e for e in new if dead[e] == since]
            has = "has" if len(experts) == 1 else "have"
            line = (
                f"Warning: step {record.step:,}: {record.layer}: {_experts(experts)} {has} had no "
                f"token since step {since:,}, in {state.idle_steps[experts[0]]} watched steps"
            )
            lines += self._told(line, record.layer)
        return lines

    def _told(self, line: str, layer: str | None = None) -> list[str]:
        """Returns the line, and advice after the first warning about a layer."""
        self._warnings += 1
        if self._warnings > _MOST_WARNINGS:
            return []
        if layer is None or layer in self._advised:
            return [line]
        self._advised.add(layer)
        return [line, f"{layer}: {self._advice(self._layers[layer])}"]

    def _advice(self, layer: MixtureOfExperts) -> str:
        router = layer.router
        name = type(router).__name__
        if not router.is_learned:
            return f"{name} learns nothing: loads follow the data. Choose a learned router"
        if "auxiliary_loss_weight" not in router.p:
            return f"{name} has no load-balancing loss; {_ADVICE}"
        weight = router.p.auxiliary_loss_weight
        return (
            f"the auxiliary_loss_weight of its {name} is {weight:g}; try a larger one. Otherwise "
            f"{_ADVICE}"
        )


def concentration(record: RouterRecord) -> float:
    """Returns how far the busiest experts are above an even load, as a share of what is possible.

    0 is an even load. 1 means that all tokens have the same k experts, k per token.
    """
    k = max(round(record.experts_per_token), 1)
    even = k / record.num_experts
    if even >= 1:
        return 0.0
    busiest = float(np.sort(record.load)[-k:].sum())
    return (busiest - even) / (1.0 - even)


def _experts(experts: Sequence[int]) -> str:
    """Returns experts in words, such as `experts 1, 5 and 7`."""
    shown = [str(e) for e in experts[:_MOST_EXPERTS]]
    more = len(experts) - len(shown)
    if more:
        shown.append(f"{more} more")
    if len(shown) == 1:
        return f"expert {shown[0]}"
    return f"experts {', '.join(shown[:-1])} and {shown[-1]}"
