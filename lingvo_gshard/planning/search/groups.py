"""Groups of layers that are sharded alike: their weights have the same kind of dimension."""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.planning.search.graph import Einsum, Flow, TracedStep

# The first of these letters that a layer's weights have determines its group.
_KINDS = {"E": "experts", "V": "vocabulary", "N": "attention", "H": "feed_forward"}
_OTHER = "others"


@dataclasses.dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers of one kind.

    Attributes:
      name: the kind.
      einsums: einsums and lookups of the layers.
      flows: tensors that the layers pass to each other.
      weights: weights of the layers.
      moments: optimizer moments of each weight.
      paths: paths of the layers that have weights.
    """

    name: str
    einsums: tuple[Einsum, ...]
    flows: tuple[Flow, ...]
    weights: tuple[VariableSpec, ...]
    moments: tuple[tuple[VariableSpec, ...], ...]
    paths: tuple[str, ...]

    @property
    def letters(self) -> frozenset[str]:
        """Returns the letters of all tensors of the group."""
        weights = {x for spec in self.weights for x in spec.layout}
        tensors = (t for e in self.einsums for t in (*e.operands, e.result))
        return frozenset(weights.union(*(t.layout for t in tensors)))


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
    multiply_adds = dict.fromkeys(names, 0)
    for einsum in step.einsums:
        if einsum.path in kinds:
            kind = kinds[einsum.path]
            multiply_adds[kind] = multiply_adds.get(kind, 0) + _multiply_adds(einsum)
    main = max(names, key=multiply_adds.__getitem__)
    kind_of = {path: main if kind == _OTHER else kind for path, kind in kinds.items()}
    between: dict[tuple[int, int], tuple[Flow, ...]] = {}
    for flow in step.flows:
        source, target = _pair(flow, kind_of, main)
        if source != target:
            pair = names.index(source), names.index(target)
            between[pair] = (*between.get(pair, ()), flow)
    groups = []
    for name in names:
        weights = tuple(s for s in step.weights if kind_of[_layer(s)] == name)
        groups.append(
            LayerGroup(
                name=name,
                einsums=tuple(e for e in step.einsums if kind_of.get(e.path, main) == name),
                flows=tuple(f for f in step.flows if _pair(f, kind_of, main) == (name, name)),
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


def _pair(flow: Flow, kind_of: dict[str, str], main: str) -> tuple[str, str]:
    return kind_of.get(flow.source_path, main), kind_of.get(flow.target_path, main)


def _rank(name: str) -> int:
    names = list(_KINDS.values())
    return names.index(name) if name in names else len(names)


def _multiply_adds(einsum: Einsum) -> int:
    return 0 if einsum.is_lookup else einsum.times * math.prod(einsum.sizes.values())
