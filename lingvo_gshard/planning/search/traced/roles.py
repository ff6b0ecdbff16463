"""Roles: what a mesh axis may split in a group of layers. One for each axis makes a table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from lingvo_gshard.core.letters import INNER, ROWS
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Strategy, Table


@dataclasses.dataclass(frozen=True)
class Role:
    """Letters that one axis splits, in activations, weights and optimizer moments."""

    activations: str = ""
    weights: str = ""
    moments: str = ""


ROLES = (
    Role(),
    Role(ROWS),
    Role(ROWS, moments="M"),
    Role(ROWS, "M", "M"),
    Role(INNER, INNER, INNER),
    Role(ROWS + "E", "E", "E"),
    Role(ROWS + "E", "E", "EM"),
    Role(ROWS + "E", "EM", "EM"),
    Role("E", "E", "E"),
)


@dataclasses.dataclass(frozen=True)
class Option:
    """One role for each axis of a mesh, in its order: how a group of layers is split."""

    roles: tuple[Role, ...]

    def rows(self, mesh: Mesh) -> tuple[str, ...]:
        """Returns the axes that split the batch, which neighbouring layers should have alike."""
        return tuple(
            axis
            for axis, role in zip(mesh.names, self.roles, strict=True)
            if "B" in role.activations
        )

    def strategy(self, mesh: Mesh) -> Strategy:
        """Returns the tables of letters."""
        tables = [self._table(kind, mesh) for kind in ("activations", "weights", "moments")]
        return Strategy("searched", *tables)

    def _table(self, kind: str, mesh: Mesh) -> Table:
        table: dict[str, tuple[str, ...]] = {}
        # Minor axes are those that experts take from the batch: then an all-to-all is all it takes.
        pairs = sorted(zip(mesh.names, self.roles, strict=True), key=lambda p: "E" in p[1].weights)
        for axis, role in pairs:
            for letter in getattr(role, kind):
                table[letter] = (*table.get(letter, ()), axis)
        return table


def options(mesh: Mesh, letters: Iterable[str]) -> list[Option]:
    """Returns the options of layers with these letters: those that differ in what they split."""
    known = set(letters) | {"B"}
    roles: dict[Role, None] = {}
    for role in ROLES:
        kept = {
            field.name: "".join(x for x in getattr(role, field.name) if x in known)
            for field in dataclasses.fields(role)
        }
        roles.setdefault(Role(**kept))
    per_axis = [list(roles) if size > 1 else [Role()] for _, size in mesh.axes]
    return [Option(chosen) for chosen in itertools.product(*per_axis)]
