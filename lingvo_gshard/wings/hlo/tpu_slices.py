"""The TPU slices that a program runs on, and the transfers between them.

A collective over several slices becomes collectives within each slice, and a pair of instructions
`send` and `recv` that hand a buffer to the runtime of the data-center network, Megascale. Their
attributes name the collective that the runtime executes, and the devices that take part.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo.module import Instruction, Shape
from lingvo_gshard.wings.hlo.replica_groups import Groups


@dataclasses.dataclass(frozen=True)
class Slices:
    """The TPU slices that a program runs on. A mesh lists its devices slice by slice.

    Attributes:
      is_split: whether the compiler made the program of one slice. Device ids then count within
        the slice, and the runtime of the data-center network joins the slices.
    """

    count: int = 1
    is_split: bool = False

    def positions(self, groups: Groups, mesh: Mesh) -> Groups:
        """Returns the groups of all slices by positions in the mesh of all slices.

        `groups` has groups or pairs of device ids of the program; () is a single group of all.
        """
        if not self.is_split:
            return groups
        return _in_every_slice(groups, self.count, mesh.size // self.count)

    def spanned(self, groups: Groups, mesh: Mesh) -> int:
        """Returns the number of slices that groups of positions in the mesh span; () is all."""
        size = mesh.size // self.count
        return max((len({i // size for i in group}) for group in groups), default=self.count)


ONE_SLICE = Slices()


@functools.lru_cache(maxsize=2**12)
def _in_every_slice(groups: Groups, count: int, size: int) -> Groups:
    groups = groups or (tuple(range(size)),)
    return tuple(
        tuple(i + index * size for i in group) for index in range(count) for group in groups
    )


_RUNTIME = "xla_megascale_runtime"
_HANDLER = "_xla_host_transfer_handler_name"
_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_TARGET = "_xla_megascale_target"
_TYPE = "_xla_megascale_transfer_type"

# Types of transfers -> HLO's opcode of the same collective.
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}

# A device's id is this number times its slice's number, which starts at 1, plus its id there.
_IDS_OF_SLICE = 100_000
# "{1,2}x{0:3}": each of the devices 0 to 3 forms a group with its counterparts in slices 1 and 2.
_COUNTERPARTS = re.compile(r"\{([\d,]+)\}x\{(\d+):(\d+)\}")
# "{{100000,200000},{100001,200001}}", or {{100000->200000},{200000->100000}} for pairs.
_GROUP = re.compile(r"\{(\d+(?:(?:,|->)\d+)*)\}")


def is_send(instruction: Instruction) -> bool:
    """Returns whether an instruction sends a buffer to other slices."""
    return instruction.opcode == "send" and _is_transfer(instruction)


def is_receive(instruction: Instruction) -> bool:
    """Returns whether an instruction receives a buffer from other slices."""
    return instruction.opcode == "recv" and _is_transfer(instruction)


def kind(send: Instruction) -> str:
    """Returns HLO's opcode of the collective that a send is part of."""
    name = _attribute(send, _TYPE)
    return _KINDS.get(name, name.lower().replace("_", "-"))


def groups(send: Instruction, devices: int) -> Groups:
    """Returns the groups of devices of a transfer, or its pairs (source, target).

    Devices are numbered from 0, slice by slice. The result is () if the target's form is unknown.
    """
    return _groups(_attribute(send, _TARGET), devices)


def sent(send: Instruction) -> list[Shape]:
    """Returns the arrays that a send hands to the runtime."""
    return list(send.operands[0].shape.arrays)


def received(send: Instruction) -> list[Shape]:
    """Returns the arrays that the runtime returns."""
    return [
        array
        for receive in receives(send)
        for array in (receive.shape.elements or (receive.shape,))[0].arrays
    ]


def results(send: Instruction) -> Iterator[Instruction]:
    """Yields the instructions that hold what the runtime returns."""
    users = send.computation.users
    for receive in receives(send):
        for done in users[receive]:
            yield from (user for user in users[done] if user.opcode == "get-tuple-element")


def receives(send: Instruction) -> list[Instruction]:
    """Returns the instructions that receive what the runtime returns for a send."""
    rendezvous = _attribute(send, _RENDEZVOUS)
    return [
        other
        for other in send.computation.instructions
        if is_receive(other) and _attribute(other, _RENDEZVOUS) == rendezvous
    ]


def _is_transfer(instruction: Instruction) -> bool:
    return _attribute(instruction, _HANDLER) == _RUNTIME


def _attribute(instruction: Instruction, name: str) -> str:
    return instruction.proto.frontend_attributes.map.get(name, "")


@functools.lru_cache(maxsize=2**12)
def _groups(target: str, devices: int) -> Groups:
    counterparts = _COUNTERPARTS.search(target)
    if counterparts:
        slices = [int(number) - 1 for number in counterparts[1].split(",")]
        ids = range(int(counterparts[2]), int(counterparts[3]) + 1)
        return tuple(tuple(index * devices + i for index in slices) for i in ids)
    return tuple(
        tuple(_position(int(number), devices) for number in re.findall(r"\d+", group))
        for group in _GROUP.findall(target)
    )


def _position(identifier: int, devices: int) -> int:
    index, within = divmod(identifier, _IDS_OF_SLICE)
    return (index - 1) * devices + within
