"""Splits a group's cost into terms: distinct einsums, flows and weights with their counts."""

from __future__ import annotations

import collections
import dataclasses
import functools

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.planning.search.groups import LayerGroup
from lingvo_gshard.planning.search.trace.graph import Einsum, Flow, Tensor


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight with its optimizer moments.

    Attributes:
      tensor: the weight.
      moments: its moments.
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
      what: an einsum, flow or weight.
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
    plain = [
        dataclasses.replace(f, source_path="", target_path="", unit=_alike(f.unit))
        for f in group.flows
    ]
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
