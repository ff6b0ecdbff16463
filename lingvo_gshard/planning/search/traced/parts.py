"""Parts of a group of layers: like products, flows and weights once, with how many there are."""

from __future__ import annotations

import collections
import dataclasses
import functools

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.planning.search.groups import Group
from lingvo_gshard.planning.search.traced.graph import Flow, Product, Tensor


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight with its moments. times: of the loop it is a stack for, else 1.

    is_computed_with: whether a product has it for an operand, and so sums up its gradient.
    """

    tensor: Tensor
    moments: tuple[Tensor, ...]
    times: int
    is_computed_with: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Of a kind of product, flow or weight `count` in a group.

    letters: pairs of a kind of table and a letter, those rules that it depends on. unit: a number
    for products that are computed again together, where layers are; per_unit: how many in one.
    """

    what: Product | Flow | Weight
    count: int
    letters: tuple[tuple[str, str], ...]
    unit: int = 0
    per_unit: int = 1


@functools.cache
def parts(group: Group) -> tuple[Part, ...]:
    """Returns the parts of a group."""
    found = []
    for number, (products, count) in enumerate(_units(group)):
        for product, per_unit in collections.Counter(products).items():
            letters = _letters(product)
            found.append(Part(product, count * per_unit, letters, number, per_unit))
    for flow, count in _flows(group):
        letters = _pairs("activations", flow.source.layout + flow.target.layout)
        found.append(Part(flow, count, letters))
    for weight, count in _weights(group):
        letters = _pairs("weights", weight.tensor.layout) + _pairs("moments", weight.tensor.layout)
        found.append(Part(weight, count, (*letters, ("activations", "B"))))
    return tuple(found)


def _letters(product: Product) -> tuple[tuple[str, str], ...]:
    letters: dict[str, str] = {"activations": "", "weights": ""}
    for tensor in (*product.operands, product.result):
        letters["weights" if tensor.is_weight else "activations"] += tensor.layout
    if product.is_lookup:
        letters["activations"] += letters["weights"]
    return tuple(pair for kind, text in letters.items() for pair in _pairs(kind, text))


def _pairs(kind: str, letters: str) -> tuple[tuple[str, str], ...]:
    return tuple((kind, letter) for letter in dict.fromkeys(letters))


def _units(group: Group) -> list[tuple[tuple[Product, ...], int]]:
    by_unit: dict[str, list[Product]] = {}
    for product in group.products:
        plain = dataclasses.replace(product, path="", weights=(), unit=_alike(product.unit))
        by_unit.setdefault(product.unit, []).append(plain)
    return list(collections.Counter(map(tuple, by_unit.values())).items())


def _flows(group: Group) -> list[tuple[Flow, int]]:
    plain = [
        dataclasses.replace(f, source_path="", target_path="", unit=_alike(f.unit))
        for f in group.flows
    ]
    return list(collections.Counter(plain).items())


def _weights(group: Group) -> list[tuple[Weight, int]]:
    computed = {path for product in group.products for path in product.weights}
    found = [
        Weight(
            tensor=_tensor(spec),
            moments=tuple(map(_tensor, moments)),
            times=spec.shape[0] if spec.layout.startswith("R") else 1,
            is_computed_with=spec.path in computed,
        )
        for spec, moments in zip(group.weights, group.moments, strict=True)
    ]
    return list(collections.Counter(found).items())


def _alike(unit: str) -> str:
    return "unit" if unit else ""


def _tensor(spec: VariableSpec) -> Tensor:
    return Tensor(spec.layout, spec.shape, spec.dtype, spec.unsplit)
