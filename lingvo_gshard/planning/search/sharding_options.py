"""Sharding options of a group of layers: one role for each mesh axis."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from lingvo_gshard.core.letters import INNER, ROWS
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Strategy, Table


@dataclasses.dataclass(frozen=True)
class AxisRole:
    """What one mesh axis shards.

    Attributes:
      activations: letters of activations.
      weights: letters of weights.
      moments: letters of optimizer moments.
    """

    activations: str = ""
    weights: str = ""
    moments: str = ""


AXIS_ROLES = (
    AxisRole(),
    AxisRole(ROWS),
    AxisRole(ROWS, moments="M"),
    AxisRole(ROWS, "M", "M"),
    AxisRole(INNER, INNER, INNER),
    AxisRole(ROWS + "E", "E", "E"),
    AxisRole(ROWS + "E", "E", "EM"),
    AxisRole(ROWS + "E", "EM", "EM"),
    AxisRole("E", "E", "E"),
)


@dataclasses.dataclass(frozen=True)
class ShardingOption:
    """How a group of layers is sharded.

    Attributes:
      roles: the role of each mesh axis, in the mesh's order.
    """

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

    def _table(self, kind: str, mesh: Mesh) -> Table:
        table: dict[str, tuple[str, ...]] = {}
        # Axes that shard both batch and experts come last: then one all-to-all reshards.
        pairs = sorted(zip(mesh.names, self.roles, strict=True), key=lambda p: "E" in p[1].weights)
        for axis, role in pairs:
            for letter in getattr(role, kind):
                table[letter] = (*table.get(letter, ()), axis)
        return table


def options(mesh: Mesh, letters: Iterable[str]) -> list[ShardingOption]:
    """Returns the distinct options of layers whose tensors have these letters."""
    known = set(letters) | {"B"}
    roles: dict[AxisRole, None] = {}
    for role in AXIS_ROLES:
        fields = {
            field.name: "".join(x for x in getattr(role, field.name) if x in known)
            for field in dataclasses.fields(role)
        }
        roles.setdefault(AxisRole(**fields))
    per_axis = [list(roles) if size > 1 else [AxisRole()] for _, size in mesh.axes]
    return [ShardingOption(chosen) for chosen in itertools.product(*per_axis)]
