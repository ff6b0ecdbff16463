"""Groups of layers that are split alike: those whose weights have the same kind of dimension."""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.planning.search.traced.graph import Flow, Product, Traced

# The first of these letters that a layer's weights have says what it is.
_KINDS = {"E": "experts", "V": "vocabulary", "N": "attention", "H": "feed_forward"}
_OTHER = "others"


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Layers of one kind. flows: those within it. moments: of every weight.

    paths: of the layers of this kind that have weights.
    """

    name: str
    products: tuple[Product, ...]
    flows: tuple[Flow, ...]
    weights: tuple[VariableSpec, ...]
    moments: tuple[tuple[VariableSpec, ...], ...]
    paths: tuple[str, ...]

    @property
    def letters(self) -> frozenset[str]:
        """All letters of its tensors."""
        found = {x for spec in self.weights for x in spec.layout}
        found.update(x for p in self.products for t in (*p.operands, p.result) for x in t.layout)
        return frozenset(found)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A task's groups. between: flows from one to another, by the pair of their numbers."""

    groups: tuple[Group, ...]
    between: dict[tuple[int, int], tuple[Flow, ...]]


def group(traced: Traced) -> Grouped:
    """Returns the groups; layers of none, such as norms, go with the one that computes most."""
    kinds = _kinds(traced)
    names = sorted(set(kinds.values()) - {_OTHER}, key=_rank) or [_OTHER]
    work = dict.fromkeys(names, 0)
    for product in traced.products:
        if product.path in kinds:
            work[kinds[product.path]] = work.get(kinds[product.path], 0) + _work(product)
    main = max(names, key=work.__getitem__)
    of = {path: main if kind == _OTHER else kind for path, kind in kinds.items()}
    between: dict[tuple[int, int], tuple[Flow, ...]] = {}
    for flow in traced.flows:
        source, target = _pair(flow, of, main)
        if source != target:
            pair = names.index(source), names.index(target)
            between[pair] = (*between.get(pair, ()), flow)
    groups = []
    for name in names:
        weights = tuple(s for s in traced.weights if of[_layer(s)] == name)
        groups.append(
            Group(
                name=name,
                products=tuple(p for p in traced.products if of.get(p.path, main) == name),
                flows=tuple(f for f in traced.flows if _pair(f, of, main) == (name, name)),
                weights=weights,
                moments=tuple(traced.moments.get(spec.path, ()) for spec in weights),
                paths=tuple(sorted(path for path, kind in kinds.items() if kind == name)),
            )
        )
    return Grouped(tuple(groups), between)


def _kinds(traced: Traced) -> dict[str, str]:
    """Layer path -> kind, of the layers that have weights."""
    kinds: dict[str, str] = {}
    for spec in traced.weights:
        kind = next((name for letter, name in _KINDS.items() if letter in spec.layout), _OTHER)
        kinds[_layer(spec)] = min(kinds.get(_layer(spec), kind), kind, key=_rank)
    return kinds


def _layer(spec: VariableSpec) -> str:
    return spec.path.rpartition(".")[0]


def _pair(flow: Flow, of: dict[str, str], main: str) -> tuple[str, str]:
    return of.get(flow.source_path, main), of.get(flow.target_path, main)


def _rank(name: str) -> int:
    names = list(_KINDS.values())
    return names.index(name) if name in names else len(names)


def _work(product: Product) -> int:
    return 0 if product.is_lookup else product.times * math.prod(product.sizes.values())
