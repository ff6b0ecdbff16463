"""The devices that a collective joins, and the mesh axes along which they lie."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf import unknown_fields

from lingvo_gshard.core import UserError
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo.messages import NEWEST_INSTRUCTION_FIELD, MeshAxesReplicaGroupListProto

Groups = tuple[tuple[int, ...], ...]


def replica_groups(instruction: Any) -> Groups:
    """Returns the groups of devices of a collective; empty if all devices form one group.

    XLA writes them as lists, as a reshaped and transposed iota, or as axes of a mesh of its own.
    Raises UserError for another form of a newer XLA. Collective-permutes have pairs instead.
    """
    lists = instruction.collective_device_list
    if instruction.HasField("mesh_axes_replica_group_list"):
        form = instruction.mesh_axes_replica_group_list
    elif instruction.HasField("iota_collective_device_list"):
        form = instruction.iota_collective_device_list
    elif lists.HasField("iota_replica_group_list"):
        form = lists.iota_replica_group_list
    else:
        listed = lists.replica_groups or instruction.replica_groups
        is_given = listed or instruction.HasField("collective_device_list")
        if not is_given and _has_newer_fields(instruction):
            raise UserError(
                f"{instruction.name}: its replica groups are in a form of a newer XLA than this "
                "version knows; install the jax that constraints.txt names"
            )
        return tuple(tuple(group.replica_ids) for group in listed if group.replica_ids)
    # Programs for thousands of devices repeat the same groups in hundreds of collectives.
    return _computed_groups(type(form), form.SerializeToString())


def source_target_pairs(instruction: Any) -> Groups:
    """Returns the pairs (source, target) of devices of a collective-permute."""
    return tuple((pair.source, pair.target) for pair in instruction.source_target_pairs)


@functools.lru_cache(maxsize=2**12)
def axes_of_groups(groups: Groups, mesh: Mesh, slices: int = 1) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes along which groups lie, in the mesh's order, and a group's size.

    There are no axes if each group is a single device, or if the groups do not follow axes. A group
    may join only those devices of an axis that are in the same slice, or one of every slice.

    Args:
      groups: positions in the mesh; () for a single group of all devices.
      slices: number of TPU slices that the mesh extends over.
    """
    groups = groups or (tuple(range(mesh.size)),)
    size = max(len(group) for group in groups)
    parts = _parts_of_axes(mesh, slices)
    found = _groups_of_axes(parts).get(_canonical(groups), ())
    return tuple(dict.fromkeys(part.partition("_")[2] for part in found)), size


@functools.lru_cache(maxsize=2**12)
def axes_of_pairs(pairs: Groups, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes that pairs of devices send along, and the number of devices on these.

    An axis is returned if the positions of any pair differ on it. No axis is returned if an id is
    outside the mesh.
    """
    ids = np.array(pairs, np.int64).reshape(-1, 2)
    if not ids.size or ids.max() >= mesh.size:
        return (), 1
    sources, targets = (np.array(np.unravel_index(ids[:, i], mesh.shape)) for i in (0, 1))
    differs = (sources != targets).any(axis=1)
    axes = tuple(name for name, moves in zip(mesh.names, differs, strict=True) if moves)
    return axes, mesh.parts(axes)


@functools.lru_cache(maxsize=64)
def _parts_of_axes(mesh: Mesh, slices: int) -> Mesh:
    """The mesh with each axis split into its parts across and within slices."""
    parts = zip(mesh.axes, mesh.across_slices(slices), strict=True)
    axes = [
        part
        for (name, size), across in parts
        for part in ((f"across_{name}", across), (f"within_{name}", size // across))
    ]
    return Mesh(tuple(axes))


@functools.lru_cache(maxsize=2**12)
def _computed_groups(form: Any, serialized: bytes) -> Groups:
    message = form.FromString(serialized)
    if isinstance(message, MeshAxesReplicaGroupListProto):
        return _groups_of_xla_mesh(message)
    ids = _transposed_iota(message.iota_reshape_dims, message.iota_transpose_perm)
    groups = ids.reshape(message.num_replica_groups, message.num_devices_per_group)
    return tuple(map(tuple, groups.tolist()))


def _groups_of_xla_mesh(message: Any) -> Groups:
    """Returns the groups of a collective over axes, or over parts of axes, of XLA's own mesh.

    A part (pre_size, size) splits its axis into three factors: pre_size, size and the rest. The
    groups extend along the middle one.
    """
    sizes = [axis.size for axis in message.mesh.axes]
    parts = []
    for axis in message.axes:
        part, size = axis.sub_axis_info, sizes[axis.mesh_axis_index]
        before, length = (part.pre_size, part.size) if part.size else (1, size)
        parts.append((axis.mesh_axis_index, before, before * length))
    spans, dimensions = [], []
    for index, size in enumerate(sizes):
        cuts = {1, size, *(cut for part in parts if part[0] == index for cut in part[1:])}
        for low, high in itertools.pairwise(sorted(cuts)):
            spans.append((index, low, high))
            dimensions.append(high // low)
    chosen = [
        position
        for axis, begin, end in parts
        for position, (index, low, high) in enumerate(spans)
        if index == axis and low >= begin and high <= end
    ]
    others = [position for position in range(len(spans)) if position not in chosen]
    ids = _device_order(message.mesh).reshape(dimensions)
    group = math.prod(dimensions[position] for position in chosen)
    return tuple(map(tuple, ids.transpose([*others, *chosen]).reshape(-1, group).tolist()))


def _device_order(mesh: Any) -> np.ndarray:
    """Returns the device ids in the order of a mesh's positions."""
    if mesh.HasField("iota"):
        return _transposed_iota(mesh.iota.dims, mesh.iota.permutation).reshape(-1)
    if mesh.device_ids:
        return np.array(mesh.device_ids)
    return np.arange(math.prod(axis.size for axis in mesh.axes))


def _has_newer_fields(instruction: Any) -> bool:
    """Returns whether an instruction has fields that are newer than the tables of messages.py."""
    found = unknown_fields.UnknownFieldSet(instruction)
    return any(field.field_number > NEWEST_INSTRUCTION_FIELD for field in found)


def _transposed_iota(dims: Sequence[int], permutation: Sequence[int]) -> np.ndarray:
    ids = np.arange(math.prod(dims)).reshape(tuple(dims))
    return ids.transpose(tuple(permutation) or None)


@functools.lru_cache(maxsize=64)
def _groups_of_axes(mesh: Mesh) -> dict[frozenset, tuple[str, ...]]:
    """Maps the groups that each set of axes forms to these axes. Axes of size 1 are left out."""
    found = {}
    wide = [index for index, size in enumerate(mesh.shape) if size > 1]
    for count in range(1, len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            others = [index for index in range(len(mesh.shape)) if index not in axes]
            size = math.prod(mesh.shape[index] for index in axes)
            groups = mesh.ids.transpose([*others, *axes]).reshape(-1, size).tolist()
            found[_canonical(groups)] = tuple(mesh.names[index] for index in axes)
    return found


def _canonical(groups: Sequence[Sequence[int]]) -> frozenset:
    """The groups without their order and without single devices, to compare them."""
    return frozenset(frozenset(group) for group in groups if len(group) > 1)
