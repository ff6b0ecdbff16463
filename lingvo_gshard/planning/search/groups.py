"""Groups of layers that are sharded alike: their weights have the same kind of dimension."""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.planning.search.trace.graph import Einsum, Flow, TracedStep

# The first of these letters that a layer's weights have determines its group.
_KINDS = {"E": "experts", "V": "vocabulary", "N": "attention", "H": "feed_forward"}
_OTHER = "others"


@dataclasses.dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers of one kind.

    Attributes:
      name: the kind.
      products: einsums and lookups of the layers.
      flows: tensors that the layers pass to each other.
      weights: weights of the layers.
      moments: optimizer moments of each weight.
      paths: paths of the layers that have weights.
    """

    name: str
    products: tuple[Einsum, ...]
    flows: tuple[Flow, ...]
    weights: tuple[VariableSpec, ...]
    moments: tuple[tuple[VariableSpec, ...], ...]
    paths: tuple[str, ...]

    @property
    def letters(self) -> frozenset[str]:
        """Returns the letters of all tensors of the group."""
        found = {x for spec in self.weights for x in spec.layout}
        found.update(x for p in self.products for t in (*p.operands, p.result) for x in t.layout)
        return frozenset(found)


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """All groups of a task.

    Attributes:
      groups: the groups.
      between: tensors that one group passes to another, by the pair of the groups' indices.
    """

    groups: tuple[LayerGroup, ...]
    between: dict[tuple[int, int], tuple[Flow, ...]]


def group(step: TracedStep) -> LayerGroups:
    """Returns the groups of a traced step.

    Layers without a kind of their own, such as norms, join the group that computes most.
    """
    kinds = _kinds(step)
    names = sorted(set(kinds.values()) - {_OTHER}, key=_rank) or [_OTHER]
    work = dict.fromkeys(names, 0)
    for product in step.products:
        if product.path in kinds:
            work[kinds[product.path]] = work.get(kinds[product.path], 0) + _work(product)
    main = max(names, key=work.__getitem__)
    of = {path: main if kind == _OTHER else kind for path, kind in kinds.items()}
    between: dict[tuple[int, int], tuple[Flow, ...]] = {}
    for flow in step.flows:
        source, target = _pair(flow, of, main)
        if source != target:
            pair = names.index(source), names.index(target)
            between[pair] = (*between.get(pair, ()), flow)
    groups = []
    for name in names:
        weights = tuple(s for s in step.weights if of[_layer(s)] == name)
        groups.append(
            LayerGroup(
                name=name,
                products=tuple(p for p in step.products if of.get(p.path, main) == name),
                flows=tuple(f for f in step.flows if _pair(f, of, main) == (name, name)),
                weights=weights,
                moments=tuple(step.moments.get(spec.path, ()) for spec in weights),
                paths=tuple(sorted(path for path, kind in kinds.items() if kind == name)),
            )
        )
    return LayerGroups(tuple(groups), between)


def _kinds(step: TracedStep) -> dict[str, str]:
    """Returns the kind of each layer that has weights, by path."""
    kinds: dict[str, str] = {}
    for spec in step.weights:
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


def _work(product: Einsum) -> int:
    return 0 if product.is_lookup else product.times * math.prod(product.sizes.values())
