"""Strategies: tables that map the letters of dimensions to mesh axes.

A strategy is given as text, in one of these forms:

    expert_tensor                                   base strategies, joined by "_"
    B,G,E->data; H,N,V->model                       a table
    activations: B,G->data,fsdp | weights: M->fsdp  a table with a section for each kind of tensor

The sections of a table are separated by "|". A section holds for the kind of tensor that it names,
or for all kinds if it names none. The rules of a section are separated by ";". A rule lists letters
and the mesh axes to split them over, major first. The axis "none" means not split. Optimizer
moments follow the rules of their weights unless the section "moments" has a rule for the letter.

The letter "*" stands for any dimension of a weight or moment. Axes of "*" that no other letter has
claimed go to the largest dimensions that they divide evenly.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

from lingvo_gshard.core import UserError, names
from lingvo_gshard.core.letters import LETTERS
from lingvo_gshard.sharding.mesh import NO_AXES, Mesh

# For each dimension of a tensor the mesh axes that split it, major first. () means not split.
Split = tuple[tuple[str, ...], ...]
Table = dict[str, tuple[str, ...]]

KINDS = ("activations", "weights", "moments")
# Stands for any dimension of a weight or moment.
ANY = "*"

_bases = {
    "replicated": "",
    "data": "activations: B,G->{batch}",
    "expert": "activations: B,G->{batch} | E->data",
    # Experts over the product of the axes that attention uses (Liu et al. 2025, arXiv 2504.14960).
    "folded": "activations: B->{batch}; G->{batch},model | E->data,model",
    "tensor": "H,N,V->model",
    "fsdp": "activations: B,G->{batch} | weights: M,*->{batch}",
    "zero1": "activations: B,G->{batch} | moments: M,*->{batch}",
    "sequence": "activations: L->model",
    "context": "activations: L,G->context",
    "pipeline": "P->stage | activations: B,G->stage",
}

_BATCH_AXES = ("fsdp", "data")
# The order of axes that split the same letter, major first. Other axes precede these.
# - `data` is minor to all axes that split token groups. Experts take over `data` from groups. In
#   this order the change is one all-to-all; in other orders XLA adds a permutation on both sides.
# - `model` is minor to all axes that split positions. It gathers positions, and other orders would
#   need a permutation there, too. Under `folded` it is minor to `data` in groups and in experts.
# - `stage` is minor to all axes. Every stage reads all rows of its devices along `data`, and in
#   this order those rows are adjacent.
_AXIS_ORDER = ("context", *_BATCH_AXES, "model", "stage")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The mesh axes that split each letter. Gradients are split as weights are."""

    name: str
    activations: Table
    weights: Table
    moments: Table

    def table(self, kind: str) -> Table:
        """Returns the table of one kind of tensor.

        Args:
          kind: "activations", "weights" or "moments".

        Raises:
          UserError: There is no such kind.
        """
        names.check(kind, KINDS, f"Unknown kind of tensor {kind!r}")
        return getattr(self, kind)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split any letter of any kind of tensor."""
        tables = (self.activations, self.weights, self.moments)
        return frozenset(axis for table in tables for axes in table.values() for axis in axes)

    def letters_over(self, axis: str) -> str:
        """Returns the letters that an axis splits in activations or weights, sorted."""
        tables = (self.activations, self.weights)
        return "".join(sorted({x for table in tables for x in table if axis in table[x]}))

    def to_text(self) -> str:
        """Returns the strategy as the text of a table, which `get` can read."""
        return " | ".join(f"{kind}: {_table_text(self.table(kind))}" for kind in KINDS)


def get(text: str, mesh: Mesh, where: str = "strategy") -> Strategy:
    """Returns the strategy that a text describes.

    Base strategies that are joined by "_" split every letter over all axes that any of them splits
    it over. Their order does not matter. The strategies data, expert, fsdp and zero1 split the
    batch over the axes `fsdp` and `data`. fsdp and zero1 split weights or moments over these two
    axes, without an axis that another letter of the tensor, such as E, has claimed.

    Args:
      text: Base strategies or a table, as described at the top of this module.
      where: Option or Params path that gives the text, for messages.

    Raises:
      UserError: A base strategy, letter, kind or axis is unknown.
    """
    given = f"`{where}={text}`"
    if "->" in text:
        return _from_table(" ".join(text.split()), text, mesh, given)
    bases = [name.strip() for name in text.split("_")]
    for base in bases:
        if base not in _bases:
            raise UserError(
                f"{given}: unknown strategy {base!r}. {names.nearest(base, _bases)} "
                "Join several by '_', or write a table such as 'B,G->data; H->model'."
            )
    parts = [_from_table(base, _base_table(base, mesh), mesh, given) for base in bases]
    return Strategy(
        "_".join(base for base in _bases if base in bases),
        *(_union((part.table(kind) for part in parts), mesh) for kind in KINDS),
    )


def axes_of(letter: str, rules: Table) -> tuple[str, ...]:
    """Returns the mesh axes of a table's rules for a letter, or for the letter that it follows."""
    if letter in rules or letter not in LETTERS:
        return rules.get(letter, ())
    return rules.get(LETTERS[letter].follows, ())


def base_names() -> tuple[str, ...]:
    """Returns the names of the base strategies."""
    return tuple(_bases)


def register(name: str, table: str) -> None:
    """Adds a base strategy.

    Its table may use mesh axes of any name. Where several axes split a letter, axes that this
    module does not know are major to known axes. Unknown axes keep the mesh's order.

    Args:
      name: Letters and digits.
      table: Text of a table, as described at the top of this module.

    Raises:
      UserError: The name is taken or has other characters, or the text is not a table.
    """
    if name in _bases:
        raise UserError(f"strategies.register: {name!r} is already a strategy")
    if not name.isalnum():
        raise UserError(f"strategies.register: {name!r} is not made of letters and digits alone")
    if "->" not in table:
        raise UserError(f"strategies.register({name!r}): {table!r} has no rule such as H->model")
    _bases[name] = table


def _base_table(base: str, mesh: Mesh) -> str:
    batch = [axis for axis in _BATCH_AXES if axis in mesh.names] or ["data"]
    return _bases[base].format(batch=",".join(batch))


def _union(tables: Iterable[Table], mesh: Mesh) -> Table:
    """Splits every letter over all axes that any table splits it over."""
    merged: dict[str, set[str]] = {}
    for table in tables:
        for letter, axes in table.items():
            merged.setdefault(letter, set()).update(axes)

    def rank(axis: str) -> tuple[int, int]:
        known = _AXIS_ORDER.index(axis) if axis in _AXIS_ORDER else -1
        return known, mesh.names.index(axis)

    return {letter: tuple(sorted(axes, key=rank)) for letter, axes in merged.items()}


def _from_table(name: str, text: str, mesh: Mesh, given: str) -> Strategy:
    sections: dict[str, Table] = {}
    for section in text.split("|"):
        kind, colon, rules = section.partition(":")
        kind, rules = (kind.strip(), rules) if colon else ("", section)
        if colon:
            names.check(kind, KINDS, f"{given}: unknown kind of tensor {kind!r}")
        if kind in sections:
            raise UserError(f"{given}: two sections for {kind or 'all kinds'}")
        sections[kind] = _parse_rules(rules, mesh, given)
    common = sections.get("", {})
    activations, weights, moments = (sections.get(kind, {}) for kind in KINDS)
    weights = {**common, **weights}
    return Strategy(name, {**common, **activations}, weights, {**weights, **moments})


def _parse_rules(rules: str, mesh: Mesh, given: str) -> Table:
    table: Table = {}
    for rule in filter(None, (rule.strip() for rule in rules.split(";"))):
        left, arrow, right = rule.partition("->")
        if not arrow or not right.strip():
            raise UserError(f"{given}: {rule!r}; expected letters->axes, as in B,G->data")
        axes = _parse_axes(right, mesh, given)
        for letter in (letter.strip() for letter in left.split(",")):
            if letter not in LETTERS and letter != ANY:
                hint = names.nearest(letter, LETTERS)
                raise UserError(f"{given}: {letter!r} is not the letter of a dimension. {hint}")
            if letter in table:
                raise UserError(f"{given}: two rules for letter {letter!r}")
            table[letter] = axes
    return table


def _hint(axis: str, mesh: Mesh, is_named: bool) -> str:
    """Suggests the mesh that a named strategy needs, or the axis that a table can have."""
    nearest = difflib.get_close_matches(axis, mesh.names, n=1)
    if not nearest or not is_named:
        return names.nearest(axis, mesh.names)
    renamed = [(axis if name == nearest[0] else name, size) for name, size in mesh.axes]
    return f"Did you mean `mesh={','.join(f'{name}={size}' for name, size in renamed)}`?"


def _parse_axes(right: str, mesh: Mesh, given: str) -> tuple[str, ...]:
    axes = tuple(axis.strip() for axis in right.split(","))
    if axes == (NO_AXES,):
        return ()
    unknown = [axis for axis in axes if axis not in mesh.names]
    if unknown:
        raise UserError(
            f"{given} needs axis {' and '.join(map(repr, unknown))}, which `mesh={mesh}` "
            f"lacks. {_hint(unknown[0], mesh, is_named='->' not in given)}"
        )
    if len(set(axes)) < len(axes):
        raise UserError(f"{given}: {right.strip()!r} names an axis more than once")
    return axes


def _table_text(table: Table) -> str:
    return "; ".join(f"{x}->{','.join(axes) or NO_AXES}" for x, axes in sorted(table.items()))
