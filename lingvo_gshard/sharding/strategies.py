"""Strategies: named tables from letters to mesh axes.

    expert_tensor                                   a base, or several joined by "_"
    B,G,E->data; H,N,V->model                       a table written out
    activations: B,G->data,fsdp | weights: M->fsdp  for activations and weights apart

A written table has sections between "|", each for the kind that it names or, unnamed, for all
kinds. A section has rules between ";": letters, "->", and one axis or more, the first the major
one. "none" in place of axes leaves a letter whole. Optimizer moments are split as their weights are
where no rule of their own says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lingvo_gshard.core.config import names
from lingvo_gshard.core.letters import LETTERS
from lingvo_gshard.sharding.mesh import NO_AXES, Mesh

# A tensor's split: for each dimension the mesh axes it is split over, the first the major one.
Split = tuple[tuple[str, ...], ...]
Table = dict[str, tuple[str, ...]]

KINDS = ("activations", "weights", "moments")

_BASES = {
    "replicated": "",
    "data": "activations: B,G->data",
    "expert": "activations: B,G->data | E->data",
    "tensor": "H,N,V->model",
    "fsdp": "activations: B,G->{batch} | weights: M->{state}",
    "zero1": "activations: B,G->{batch} | moments: M->{state}",
    "sequence": "activations: L->model",
    "context": "activations: L,G->context",
    "pipeline": "P->stage | activations: B,G->stage",
}

_BATCH_AXES = ("fsdp", "data")
# Of axes that one letter is split over the first is the major one. `data` is minor to what else
# splits groups: then they hand over to experts, which take `data` from them, by an all-to-all
# alone, where in the other order XLA permutes all parts before and after. So is `model` to what
# else splits positions, which it gathers.
# `stage` is minor to all: every stage reads all rows that its devices along `data` have, which are
# then rows side by side.
_MAJOR_FIRST = ("context", *_BATCH_AXES, "model", "stage")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What each letter is split over, in activations, weights and optimizer moments."""

    name: str
    activations: Table
    weights: Table
    moments: Table

    def table(self, kind: str) -> Table:
        """Returns one kind's table; ValueError if there is no such kind."""
        if kind not in KINDS:
            raise ValueError(f"Unknown kind of tensor {kind!r}. {names.nearest(kind, KINDS)}")
        return getattr(self, kind)

    @property
    def axes(self) -> frozenset[str]:
        """All axes that something is split over."""
        tables = (self.activations, self.weights, self.moments)
        return frozenset(axis for table in tables for axes in table.values() for axis in axes)

    def to_text(self) -> str:
        """Returns the strategy as a written table, which `get` reads back."""
        return " | ".join(f"{kind}: {_table_text(self.table(kind))}" for kind in KINDS)


def get(text: str, mesh: Mesh, where: str = "--strategy") -> Strategy:
    """Returns the strategy of a name, or of a table written out, on a mesh.

    The bases are replicated, data, expert, tensor, fsdp, zero1, sequence, context and pipeline; a
    hybrid splits whatever any of its bases splits, in whatever order they are named. If the mesh
    has an axis `fsdp`, then fsdp and zero1 split weights and moments over that in place of `data`,
    and the batch over both.

    Raises ValueError, naming `where` and --mesh, for an unknown base, letter, kind or axis.
    """
    given = f"{where}={text}"
    if "->" in text:
        return _from_table(" ".join(text.split()), text, mesh, given)
    bases = [name.strip() for name in text.split("_")]
    for base in bases:
        if base not in _BASES:
            raise ValueError(
                f"{given}: unknown strategy {base!r}. {names.nearest(base, _BASES)} "
                "Several can be joined by '_', or a table be written out: 'B,G->data; H->model'."
            )
    parts = [_from_table(base, _base_table(base, mesh), mesh, given) for base in bases]
    return Strategy(
        "_".join(base for base in _BASES if base in bases),
        *(_union(part.table(kind) for part in parts) for kind in KINDS),
    )


def base_names() -> tuple[str, ...]:
    """Returns the names that hybrids are made of."""
    return tuple(_BASES)


def _base_table(base: str, mesh: Mesh) -> str:
    batch = [axis for axis in _BATCH_AXES if axis in mesh.names] or ["data"]
    return _BASES[base].format(batch=",".join(batch), state=batch[0])


def _union(tables: Iterable[Table]) -> Table:
    """Every letter over all axes that any table splits it over."""
    merged: dict[str, set[str]] = {}
    for table in tables:
        for letter, axes in table.items():
            merged.setdefault(letter, set()).update(axes)
    return {letter: tuple(sorted(merged[letter], key=_MAJOR_FIRST.index)) for letter in merged}


def _from_table(name: str, text: str, mesh: Mesh, given: str) -> Strategy:
    sections: dict[str, Table] = {}
    for section in text.split("|"):
        kind, colon, rules = section.partition(":")
        kind, rules = (kind.strip(), rules) if colon else ("", section)
        if colon and kind not in KINDS:
            raise ValueError(
                f"{given}: unknown kind of tensor {kind!r}. {names.nearest(kind, KINDS)}"
            )
        if kind in sections:
            raise ValueError(f"{given}: two sections for {kind or 'all kinds'}")
        sections[kind] = _parse_rules(rules, mesh, given)
    common = sections.get("", {})
    activations, weights, moments = (sections.get(kind, {}) for kind in KINDS)
    weights = {**common, **weights}
    return Strategy(name, {**common, **activations}, weights, {**weights, **moments})


def _parse_rules(rules: str, mesh: Mesh, given: str) -> Table:
    table: Table = {}
    for rule in filter(None, (rule.strip() for rule in rules.split(";"))):
        left, arrow, right = rule.partition("->")
        if not arrow:
            raise ValueError(f"{given}: {rule!r}; expected letters->axes, as in B,G->data")
        axes = _parse_axes(right, mesh, given)
        for letter in (letter.strip() for letter in left.split(",")):
            if letter not in LETTERS:
                hint = names.nearest(letter, LETTERS)
                raise ValueError(f"{given}: {letter!r} is no letter of a dimension. {hint}")
            if letter in table:
                raise ValueError(f"{given}: two rules for letter {letter!r}")
            table[letter] = axes
    return table


def _parse_axes(right: str, mesh: Mesh, given: str) -> tuple[str, ...]:
    axes = tuple(axis.strip() for axis in right.split(","))
    if axes == (NO_AXES,):
        return ()
    unknown = [axis for axis in axes if axis not in mesh.names]
    if unknown:
        raise ValueError(
            f"{given} needs axis {' and '.join(map(repr, unknown))}, which --mesh={mesh} "
            f"lacks. {names.nearest(unknown[0], mesh.names)}"
        )
    if len(set(axes)) < len(axes):
        raise ValueError(f"{given}: {right.strip()!r} names an axis more than once")
    return axes


def _table_text(table: Table) -> str:
    return "; ".join(f"{x}->{','.join(axes) or NO_AXES}" for x, axes in sorted(table.items()))
