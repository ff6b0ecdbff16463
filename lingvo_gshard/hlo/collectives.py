"""What collectives in HLO move, alone, in fusions and as starts of asynchronous ones."""

from __future__ import annotations

from lingvo_gshard.hlo import demand
from lingvo_gshard.hlo.operation import CollectiveCall
from lingvo_gshard.hlo.replica_groups import axes_of_groups, axes_of_pairs
from lingvo_gshard.hlo.shapes import Shape, numpy_name
from lingvo_gshard.hlo.summary import KINDS
from lingvo_gshard.hlo.text import Computation, Instruction
from lingvo_gshard.sharding.mesh import Mesh


def collectives(instruction: Instruction, mesh: Mesh) -> list[tuple[Instruction, CollectiveCall]]:
    """Returns the collectives that an instruction is, starts, or does within its fusion.

    One that is carried out beside other fusions is found where it starts. Each comes with its own
    instruction.
    """
    kind = base_opcode(instruction)
    if kind in KINDS:
        return [(instruction, _call(instruction, kind, mesh))]
    if kind in ("fusion", "async"):
        return [
            (inner, _call(inner, kind, mesh))
            for called in instruction.called("calls")
            for inner, kind in _within(called)
        ]
    return []


def base_opcode(instruction: Instruction) -> str:
    """The opcode; of what starts an asynchronous operation, the operation's."""
    return instruction.opcode.removesuffix("-start")


def result(instruction: Instruction) -> Shape:
    """What an instruction makes; what starts an operation returns its operands beside it."""
    shape, opcode = instruction.shape, instruction.opcode
    if not opcode.endswith("-start") or shape.elements is None or opcode == "all-reduce-start":
        return shape
    return shape.elements[0 if opcode == "copy-start" else 1]


def _within(computation: Computation) -> list[tuple[Instruction, str]]:
    if demand.is_async_collective(computation):
        if not demand.starts_async_collective(computation):
            return []
    found = []
    for inner in computation.instructions:
        kind = base_opcode(inner)
        if kind in KINDS:
            is_scattered = kind == "all-reduce" and _is_scattered(inner)
            found.append((inner, "reduce-scatter" if is_scattered else kind))
        elif kind in ("fusion", "async", "call"):
            for called in inner.called("calls", "to_apply"):
                found += _within(called)
    return found


def _is_scattered(summed: Instruction) -> bool:
    """Whether a fusion keeps but this device's part of a sum, which it takes by its own number."""
    all_users = summed.computation.users
    users = all_users[summed.name]
    while users and all(i.opcode in ("get-tuple-element", "bitcast", "reshape") for i in users):
        users = [user for i in users for user in all_users[i.name]]
    return bool(users) and all(i.opcode == "dynamic-slice" for i in users)


def _call(instruction: Instruction, kind: str, mesh: Mesh) -> CollectiveCall:
    if kind == "collective-permute":
        axes, size = axes_of_pairs(instruction.attributes["source_target_pairs"], mesh)
    else:
        axes, size = axes_of_groups(_groups(instruction), mesh)
    arrays = [array for operand in instruction.operands for array in operand.shape.arrays]
    largest = max(arrays, key=lambda array: array.bytes)
    taken = sum(array.bytes for array in arrays)
    return CollectiveCall(
        kind=kind,
        axes=axes,
        group_size=size,
        dtype=numpy_name(largest.dtype),
        bytes=max(taken, result(instruction).bytes),
    )


def _groups(instruction: Instruction) -> str:
    """The text of its groups; that of a mesh's device order, after a comma, belongs to it."""
    attributes = instruction.attributes
    groups = attributes.get("replica_groups", "{}")
    order = attributes.get("device_ids")
    return f"{groups}, device_ids={order}" if order else groups
