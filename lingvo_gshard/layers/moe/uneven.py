"""Warns of groups and experts that do not divide evenly over the devices of a mesh."""

from __future__ import annotations

import logging
import math

from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import current_partitioning

_log = logging.getLogger(__name__)
# Axes that rows and weights may be split over: where one has the experts, the other has the rest.
_OTHER_AXES = {"data": "fsdp", "fsdp": "data"}


def warn_of_groups(groups: Groups, path: str) -> None:
    """Warns of a group_size that causes padding or communication between devices.

    Args:
      groups: The groups of a batch.
      path: Path of the layer.
    """
    current = current_partitioning()
    if current is None:
        return
    parts = current.parts(current.split("G", path=path)[0])
    if groups.count % parts:
        _log.warning(
            f"{path}: {groups.count} token groups do not divide evenly over {parts} devices. "
            f"Choose a group_size that gives a multiple of {parts} groups to avoid padding and "
            "extra communication."
        )
    if groups.cross_parts():
        _log.warning(
            f"{path}.group_size: groups of {groups.size} tokens cross the devices that rows of "
            f"{groups.length} positions are split over. Choose a group_size that divides the part "
            "of one device to avoid gathering the rows."
        )


def warn_of_experts(num_experts: int, path: str) -> None:
    """Warns if devices compute experts that do not exist, and names a mesh without them.

    Args:
      num_experts: Size of E.
      path: Path of the layer.
    """
    current = current_partitioning()
    if current is None:
        return
    axes = current.split("E", path=path)[0]
    parts = current.parts(axes)
    if num_experts % parts == 0:
        return
    padded = math.ceil(num_experts / parts) * parts
    advice = ""
    if len(axes) == 1:
        mesh = _even_mesh(current.mesh, axes[0], num_experts)
        advice = f" On `mesh={mesh}` they do."
    _log.warning(
        f"{path}: {num_experts} experts do not divide evenly over {parts} devices along "
        f"{' and '.join(axes)}: {1 - num_experts / padded:.0%} of the experts' time is padding."
        f"{advice}"
    )


def _even_mesh(mesh: Mesh, axis: str, num_experts: int) -> Mesh:
    """Returns a mesh on whose axis the experts divide evenly; a second axis has the rest."""
    other = _OTHER_AXES.get(axis, "fsdp")
    size = math.gcd(num_experts, mesh.axis_size(axis))
    rest = mesh.axis_size(axis) // size
    axes = []
    for name, given in mesh.axes:
        axes.append((name, size if name == axis else given * rest if name == other else given))
        if name == axis and other not in mesh.names:
            axes.append((other, rest))
    return Mesh(tuple(axes), mesh.device_order)
