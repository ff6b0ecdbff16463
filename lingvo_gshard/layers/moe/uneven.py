"""Warns of groups and experts that do not divide evenly over the devices of a mesh."""

from __future__ import annotations

import logging
import math

from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import current_partitioning

_log = logging.getLogger(__name__)
# The axis that rows and weights may be split over besides the experts' own.
_OTHER_AXIS = "fsdp"


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
        advice = f" On --mesh={mesh} they do."
    _log.warning(
        f"{path}: {num_experts} experts do not divide evenly over {parts} devices along "
        f"{' and '.join(axes)}: {1 - num_experts / padded:.0%} of the experts' time is padding."
        f"{advice}"
    )


def _even_mesh(mesh: Mesh, axis: str, num_experts: int) -> Mesh:
    """Returns a mesh on whose axis the experts divide evenly; a second axis has the rest."""
    size = math.gcd(num_experts, mesh.axis_size(axis))
    rest = mesh.axis_size(axis) // size
    sizes = {}
    for name, given in mesh.axes:
        sizes[name] = size if name == axis else given
        if name == axis:
            sizes[_OTHER_AXIS] = rest * dict(mesh.axes).get(_OTHER_AXIS, 1)
    if _OTHER_AXIS in mesh.names:
        sizes[_OTHER_AXIS] = rest * mesh.axis_size(_OTHER_AXIS)
    return Mesh(tuple(sizes.items()), mesh.device_order)
