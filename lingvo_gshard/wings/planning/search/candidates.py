"""Candidates of the search: a mesh, sharding tables and a rematerialization policy."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from lingvo_gshard.core import VariableSpec, letters, tf
from lingvo_gshard.sharding import NO_AXES, Mesh, Strategy, strategies
from lingvo_gshard.wings.planning.search.choices import Candidate, Saving


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor's shape and letters. The letters in `unsplit` are never sharded.

    Only a kernel has a virtual tensor, a block at a time, so that it takes no memory.
    """

    layout: str
    shape: tuple[int, ...]
    dtype: str
    unsplit: str = ""
    is_virtual: bool = False

    @functools.cached_property
    def is_weight(self) -> bool:
        """Returns whether the tensor has no batch dimension."""
        return not set(letters.TOKENS) & set(self.layout)

    @functools.cached_property
    def itemsize(self) -> int:
        """Returns the bytes of one element in memory."""
        return 0 if self.is_virtual else tf.as_dtype(self.dtype).size

    @property
    def bytes(self) -> int:
        """Returns the bytes of the unsharded tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Einsum:
    """An einsum of two operands in the forward pass, or a lookup in a table.

    A lookup is an einsum with a one-hot first operand that costs nothing to compute or move.

    Attributes:
      weights: paths of the weights that an operand is made of.
      unit: the rematerialization unit; empty outside of all units.
      saved: tensors that the backward pass reads, if no earlier einsum saves them.
      is_tied: whether an einsum, too, uses the table of a lookup as a weight.
      share: the share of its products that are computed; kernels of attention skip hidden keys.
      is_dropless: whether a manual region computes it (wings/dropless/dispatch.py), which splits
        groups and experts over devices and nothing else.
    """

    operands: tuple[Tensor, Tensor]
    result: Tensor
    path: str
    times: int = 1
    weights: tuple[str, ...] = ()
    unit: str = ""
    begins_unit: bool = False
    saved: tuple[Tensor, ...] = ()
    is_lookup: bool = False
    is_tied: bool = False
    share: float = 1.0
    is_dropless: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the size of each letter."""
        tensors = (*self.operands, self.result)
        return {x: n for t in tensors for x, n in zip(t.layout, t.shape, strict=True)}


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """The rows of a dropless dispatch, one for each expert of a token.

    Attributes:
      choices: experts of a token.
      bound: as in DroplessDispatch.
      exchange: name of the exchange; empty if the search chooses it.
      itemsize: bytes of a number of a row.
    """

    choices: int
    bound: float
    exchange: str
    itemsize: int


@dataclasses.dataclass(frozen=True)
class Flow:
    """A tensor that one layer produces and the same or another layer reads.

    Attributes:
      source: the tensor with the producer's letters.
      target: the tensor with the reader's letters.
      unit: the rematerialization unit of the reader; empty outside of all units.
      rows: what its rows are, if they travel to experts or back without capacity.
    """

    source: Tensor
    target: Tensor
    source_path: str
    target_path: str
    times: int = 1
    unit: str = ""
    rows: ExpertRows | None = None


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A training step for the cost model. Einsums and flows belong to one micro-batch.

    Attributes:
      einsums: einsums and lookups, in the order of computation.
      moments: optimizer moments of each weight, by the weight's path.
      inputs: bytes of a batch.
    """

    einsums: tuple[Einsum, ...]
    flows: tuple[Flow, ...]
    weights: tuple[VariableSpec, ...]
    moments: dict[str, tuple[VariableSpec, ...]]
    inputs: int = 0
    micro_batches: int = 1
    precision: str = ""


# The first of these letters that a layer's weights have determines its group.
_KINDS = {"E": "experts", "V": "vocabulary", "N": "attention", "H": "feed_forward"}
_OTHER = "others"


@dataclasses.dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers of one kind, with their part of a `TracedStep`."""

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
    """All groups of a task, and the flows between two groups by the pair of their indices."""

    groups: tuple[LayerGroup, ...]
    between: dict[tuple[int, int], tuple[Flow, ...]]


def group(step: TracedStep) -> LayerGroups:
    """Returns the groups of a traced step.

    Layers without a kind of their own, such as norms, join the group that computes most.
    """
    kinds = _kinds(step)
    names = sorted(set(kinds.values()) - {_OTHER}, key=_rank) or [_OTHER]
    multiply_adds: collections.Counter[str] = collections.Counter()
    for einsum in step.einsums:
        if einsum.path in kinds and not einsum.is_lookup:
            multiply_adds[kinds[einsum.path]] += einsum.times * math.prod(einsum.sizes.values())
    main = max(names, key=multiply_adds.__getitem__)
    kind_of = {path: main if kind == _OTHER else kind for path, kind in kinds.items()}
    for flow in step.flows:
        for path in {flow.source_path, flow.target_path} - set(kind_of):
            kind_of[path] = _kind_of_parent(path, kinds, main)
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


def _kind_of_parent(path: str, kinds: dict[str, str], main: str) -> str:
    """Returns the kind of a layer without weights: mixtures pass rows to their experts."""
    below = {kind for child, kind in kinds.items() if child.startswith(f"{path}.")}
    experts, attention = _KINDS["E"], _KINDS["N"]
    return experts if experts in below and attention not in below else main


def _layer(spec: VariableSpec) -> str:
    return spec.path.rpartition(".")[0]


def _pair(flow: Flow, kind_of: dict[str, str], main: str) -> tuple[str, str]:
    return kind_of.get(flow.source_path, main), kind_of.get(flow.target_path, main)


def _rank(name: str) -> int:
    names = list(_KINDS.values())
    return names.index(name) if name in names else len(names)


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields the ordered factorizations of a number into `count` factors, all over 1 if several."""
    if count == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in factorizations(number // first, count - 1):
                yield (first, *rest)


@dataclasses.dataclass(frozen=True)
class AxisRole:
    """The letters that one mesh axis shards."""

    activations: str = ""
    weights: str = ""
    moments: str = ""


AXIS_ROLES = (
    AxisRole(),
    AxisRole(letters.ROWS),
    AxisRole(letters.ROWS, moments="M"),
    AxisRole(letters.ROWS, "M", "M"),
    AxisRole(letters.INNER, letters.INNER, letters.INNER),
    AxisRole(letters.ROWS + "E", "E", "E"),
    AxisRole(letters.ROWS + "E", "E", "EM"),
    AxisRole(letters.ROWS + "E", "EM", "EM"),
    AxisRole("E", "E", "E"),
    # Folding: groups of tokens are split further than rows, over an axis of attention's heads.
    AxisRole("GE", "E", "E"),
)


@dataclasses.dataclass(frozen=True)
class ShardingOption:
    """The sharding of a group of layers: the role of each mesh axis, in the mesh's order."""

    roles: tuple[AxisRole, ...]

    def rows(self, mesh: Mesh) -> tuple[str, ...]:
        """Returns the axes that shard the batch. Neighboring groups reshard if theirs differ."""
        return tuple(
            axis
            for axis, role in zip(mesh.names, self.roles, strict=True)
            if "B" in role.activations
        )

    def strategy(self, mesh: Mesh) -> Strategy:
        """Returns the option as a strategy."""
        tables = [self._table(kind, mesh) for kind in ("activations", "weights", "moments")]
        return Strategy("searched", *tables)

    def _table(self, kind: str, mesh: Mesh) -> strategies.Table:
        table: dict[str, tuple[str, ...]] = {}
        # Axes that shard both batch and experts come last: then one all-to-all reshards.
        pairs = sorted(zip(mesh.names, self.roles, strict=True), key=lambda p: "E" in p[1].weights)
        for axis, role in pairs:
            for letter in getattr(role, kind):
                table[letter] = (*table.get(letter, ()), axis)
        return table


def sharding_options(mesh: Mesh, letters: Iterable[str]) -> list[ShardingOption]:
    """Returns the distinct options of layers whose tensors have these letters."""
    known = set(letters) | {"B"}

    def of_layers(letters: str) -> str:
        return "".join(letter for letter in letters if letter in known)

    roles = dict.fromkeys(
        AxisRole(*map(of_layers, dataclasses.astuple(role))) for role in AXIS_ROLES
    )
    per_axis = [list(roles) if size > 1 else [AxisRole()] for _, size in mesh.axes]
    return [ShardingOption(chosen) for chosen in itertools.product(*per_axis)]


Tables = dict[str, strategies.Table]

_BATCH_NAMES = ("data", "fsdp", "batch")
_OTHER_NAMES = ("model", "inner", "outer")


def candidate(
    groups: LayerGroups,
    chosen: Sequence[ShardingOption],
    mesh: Mesh,
    saving: Saving,
    step: TracedStep,
) -> Candidate:
    """Returns the candidate that shards each group by its option, with axes named for their use."""
    paths = [_layer(spec) for spec in step.weights]
    names = _axis_names(mesh, chosen)
    tables = [
        {
            kind: {x: tuple(names[a] for a in axes) for x, axes in table.items()}
            for kind, table in _tables(option, mesh, group).items()
        }
        for group, option in zip(groups.groups, chosen, strict=True)
    ]
    common = _common(groups.groups, tables)
    overrides = []
    for group, own in zip(groups.groups, tables, strict=True):
        different = {
            kind: {x: axes for x, axes in own[kind].items() if common[kind][x] != axes}
            for kind in strategies.KINDS
        }
        if any(different.values()):
            # An override without a table for moments shards them like the weights.
            different["moments"] |= {x: own["moments"][x] for x in different["weights"]}
            text = _text(different, _rules)
            overrides += [(pattern, text) for pattern in patterns(group.paths, paths)]
    sizes = ",".join(f"{names[axis]}={size}" for axis, size in mesh.axes)
    return Candidate(
        mesh=sizes,
        # A table replicates letters that it does not name.
        strategy=_text(
            common, lambda table: _rules({x: axes for x, axes in table.items() if axes})
        ),
        overrides=tuple(overrides),
        rematerialize=saving.policy,
        micro_batches=step.micro_batches,
        precision=step.precision,
        offload_moments=saving.offloads_moments,
    )


def patterns(paths: Iterable[str], others: Iterable[str]) -> list[str]:
    """Returns patterns that match the layers `paths` and their children, but not `others`."""
    inside = set(paths)
    outside = [path for path in others if not any(_is_below(path, p) for p in inside)]
    tops = [p for p in sorted(inside) if not any(p != q and _is_below(p, q) for q in inside)]
    general: dict[str, None] = {}
    for path in tops:
        pattern = re.sub(r"\[\d+\]", "[*]", path)
        is_general = not any(_matches(pattern, other) for other in outside)
        general.setdefault(pattern if is_general else path)
    return list(general)


def _is_below(path: str, layer: str) -> bool:
    return path == layer or path.startswith((f"{layer}.", f"{layer}["))


def _matches(pattern: str, path: str) -> bool:
    steps = path.split(".")
    escaped = pattern.replace("[", "[[]")
    ancestors = (".".join(steps[:end]) for end in range(1, len(steps) + 1))
    return any(fnmatch.fnmatchcase(name, escaped) for name in ancestors)


def _axis_names(mesh: Mesh, chosen: Sequence[ShardingOption]) -> dict[str, str]:
    """Returns a name for each axis: `data` shards the batch and replicates the weights."""
    rows = [a for a in mesh.names if any(a in option.rows(mesh) for option in chosen)]

    def is_gathered(axis: str) -> bool:
        return any("M" in option.roles[mesh.names.index(axis)].weights for option in chosen)

    others = [axis for axis in mesh.names if axis not in rows]
    batch = zip(sorted(rows, key=is_gathered), _BATCH_NAMES, strict=False)
    return {**dict(batch), **dict(zip(others, _OTHER_NAMES, strict=False))}


def _tables(option: ShardingOption, mesh: Mesh, group: LayerGroup) -> Tables:
    """Returns an option's tables, with an entry for every letter that the group replicates."""
    strategy = option.strategy(mesh)
    weights = {x for spec in group.weights for x in spec.layout}
    relevant = {"activations": group.letters | {"B"}, "weights": weights, "moments": weights}
    return {
        kind: {x: strategy.table(kind).get(x, ()) for x in sorted(relevant[kind])}
        for kind in strategies.KINDS
    }


def _common(groups: Sequence[LayerGroup], tables: Sequence[Tables]) -> Tables:
    """Returns the axes of each letter, from the group with the most weights that has the letter."""
    by_weight = sorted(
        zip(groups, tables, strict=True),
        key=lambda pair: sum(math.prod(spec.shape) for spec in pair[0].weights),
    )
    merged: Tables = {kind: {} for kind in strategies.KINDS}
    for _, own in by_weight:
        for kind in strategies.KINDS:
            merged[kind].update(own[kind])
    return merged


def _text(tables: Tables, rules: Callable[[strategies.Table], str]) -> str:
    """Returns the tables as text for strategies.get, moments only if they differ from weights."""
    moments = {x: axes for x, axes in tables["moments"].items() if tables["weights"].get(x) != axes}
    kinds = {**tables, "moments": moments}
    sections = [f"{kind}: {text}" for kind in strategies.KINDS if (text := rules(kinds[kind]))]
    return " | ".join(sections) or f"B->{NO_AXES}"


def _rules(table: strategies.Table) -> str:
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for letter, axes in table.items():
        by_axes.setdefault(axes, []).append(letter)
    return "; ".join(
        f"{','.join(letters)}->{','.join(axes) or NO_AXES}" for axes, letters in by_axes.items()
    )
