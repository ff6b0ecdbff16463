"""Finds the collectives that an instruction executes, within fusions and asynchronously too."""

from __future__ import annotations

from collections.abc import Iterator

from lingvo_gshard.hlo import demand
from lingvo_gshard.hlo.module import Computation, Instruction
from lingvo_gshard.hlo.operations import Collective
from lingvo_gshard.hlo.replica_groups import (
    axes_of_groups,
    axes_of_pairs,
    replica_groups,
    source_target_pairs,
)
from lingvo_gshard.hlo.shapes import numpy_name
from lingvo_gshard.sharding.mesh import Mesh

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
    return instruction.base_opcode in KINDS


def collectives(instruction: Instruction, mesh: Mesh) -> list[tuple[Instruction, Collective]]:
    """Returns the collectives that an instruction executes, each with its own instruction.

    These are the instruction itself, or those within its fusion. An asynchronous collective is
    reported where it starts.
    """
    if is_collective(instruction):
        return [(instruction, _collective(instruction, instruction.base_opcode, mesh))]
    if instruction.opcode in ("fusion", "async-start"):
        return [
            (inner, _collective(inner, kind, mesh))
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


def _collective(instruction: Instruction, kind: str, mesh: Mesh) -> Collective:
    proto = instruction.executed.proto
    if kind == "collective-permute":
        axes, size = axes_of_pairs(source_target_pairs(proto), mesh)
    else:
        axes, size = axes_of_groups(replica_groups(proto), mesh)
    arrays = [array for operand in instruction.operands for array in operand.shape.arrays]
    largest = max(arrays, key=lambda array: array.bytes)
    return Collective(
        kind=kind,
        axes=axes,
        group_size=size,
        dtype=numpy_name(largest.dtype),
        bytes=max(sum(array.bytes for array in arrays), instruction.result.bytes),
    )
