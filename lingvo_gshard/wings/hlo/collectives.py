"""Finds the collectives that an instruction executes, within fusions and asynchronously too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo import demand, tpu_slices
from lingvo_gshard.wings.hlo.module import Computation, Instruction, Shape, numpy_name
from lingvo_gshard.wings.hlo.operations import Collective
from lingvo_gshard.wings.hlo.replica_groups import (
    Groups,
    axes_of_groups,
    axes_of_pairs,
    replica_groups,
    source_target_pairs,
)
from lingvo_gshard.wings.hlo.tpu_slices import ONE_SLICE, Slices

KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "ragged-all-to-all",
    "collective-broadcast",
)


def is_collective(instruction: Instruction) -> bool:
    """Returns whether the instruction itself is a collective, or starts one."""
    return instruction.base_opcode in KINDS or tpu_slices.is_send(instruction)


def collectives(
    instruction: Instruction, mesh: Mesh, slices: Slices = ONE_SLICE
) -> list[tuple[Instruction, Collective]]:
    """Returns the collectives that an instruction executes, each with its own instruction.

    These are the instruction itself, or those within its fusion. An asynchronous collective is
    reported where it starts. A transfer between slices is reported where it sends.
    """
    if tpu_slices.is_send(instruction):
        return [(instruction, _across_slices(instruction, mesh, slices))]
    if is_collective(instruction):
        return [(instruction, _collective(instruction, instruction.base_opcode, mesh, slices))]
    if instruction.opcode in ("fusion", "async-start"):
        return [
            (inner, _collective(inner, kind, mesh, slices))
            for called in instruction.called
            for inner, kind in _embedded(called)
        ]
    return []


def _embedded(computation: Computation) -> Iterator[tuple[Instruction, str]]:
    """Yields the collectives of an embedded computation with their kinds."""
    if demand.is_async_collective(computation) and not demand.starts_async_collective(computation):
        return
    for inner in computation.instructions:
        kind = inner.base_opcode
        if kind in KINDS:
            is_scattered = kind == "all-reduce" and _is_scattered(inner)
            yield inner, "reduce-scatter" if is_scattered else kind
        elif inner.opcode in ("fusion", "async-start", "call"):
            for called in inner.called:
                yield from _embedded(called)


def _is_scattered(summed: Instruction) -> bool:
    """Whether a fusion keeps only this device's part of a sum, sliced out by the device's id."""
    all_users = summed.computation.users
    users = all_users[summed]
    while users and all(i.opcode in ("get-tuple-element", "bitcast", "reshape") for i in users):
        users = [user for i in users for user in all_users[i]]
    return bool(users) and all(i.opcode == "dynamic-slice" for i in users)


def _collective(instruction: Instruction, kind: str, mesh: Mesh, slices: Slices) -> Collective:
    proto = instruction.executed.proto
    is_permute = kind == "collective-permute"
    ids = source_target_pairs(proto) if is_permute else replica_groups(proto)
    arrays = [array for operand in instruction.operands for array in operand.shape.arrays]
    size = max(sum(array.bytes for array in arrays), instruction.result.bytes)
    if kind == "ragged-all-to-all":
        # Rows, and a result with room for the most rows. The smaller one is nearer to what moves.
        size = min(array.bytes for array in arrays[:2])
    found = _make(kind, slices.positions(ids, mesh), arrays, size, mesh, slices)
    if kind == "ragged-all-to-all" and len(arrays) > 2:
        # Operands after rows and result are numbers, one for each update.
        updates = arrays[2].dimensions[0] // max(found.group_size, 1)
        return dataclasses.replace(found, updates=updates)
    return found


def _across_slices(send: Instruction, mesh: Mesh, slices: Slices) -> Collective:
    """The collective between slices that a send is part of."""
    sent, received = tpu_slices.sent(send), tpu_slices.received(send)
    size = max(sum(array.bytes for array in arrays) for arrays in (sent, received))
    groups = tpu_slices.groups(send, mesh.size // slices.count)
    return _make(tpu_slices.kind(send), groups, sent, size, mesh, slices)


def _make(
    kind: str, groups: Groups, arrays: list[Shape], size: int, mesh: Mesh, slices: Slices
) -> Collective:
    """Returns a collective of groups or pairs of positions in the mesh; () is a group of all."""
    spanned = slices.spanned(groups, mesh)
    if kind == "collective-permute":
        axes, group_size = axes_of_pairs(groups, mesh)
        across = dict(zip(mesh.names, mesh.across_slices(slices.count), strict=True))
        joined = math.prod(across[axis] for axis in axes)
        # Pairs within a slice join its part of an axis only.
        group_size, spanned = (group_size, joined) if spanned > 1 else (group_size // joined, 1)
    else:
        axes, group_size = axes_of_groups(groups, mesh, slices.count)
    return Collective(
        kind=kind,
        axes=axes,
        group_size=group_size,
        dtype=numpy_name(max(arrays, key=lambda array: array.bytes).dtype),
        bytes=size,
        slices=spanned,
    )
