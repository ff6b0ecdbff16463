"""The operations that one device executes in one step, and the collectives among them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

PHASES = ("forward", "rematerialized", "backward", "optimizer", "other")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The data that a collective moves.

    Attributes:
      kind: HLO's opcode, such as "all-to-all".
      axes: names of the mesh axes along which it communicates, in the mesh's order. Empty if its
        groups do not follow axes.
      dtype: NumPy's name of the type of the largest array.
      bytes: size of one device's operands or of its results, whichever is larger.
      slices: number of TPU slices that a group spans. A group of several slices communicates over
        the data-center network.
      updates: updates of a ragged exchange to each device of a group.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    bytes: int
    slices: int = dataclasses.field(default=1, kw_only=True)
    updates: int = dataclasses.field(default=1, kw_only=True)


@dataclasses.dataclass(frozen=True)
class CollectiveCall(Collective):
    """A collective in a program, with its origin.

    Attributes:
      op_name: TensorFlow's name of the operation that the compiler made it for.
      layer: name scopes of the layer, such as "encoder/layers_0/feed_forward"; may be empty.
      phase: one of PHASES.
      times: number of executions per step. A collective outside of loops is executed once.
    """

    op_name: str
    layer: str
    phase: str
    times: int


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """The data that an operation moves between the memories of a device and its host.

    Attributes:
      bytes: size of what one execution moves.
    """

    bytes: int
    to_host: bool


@dataclasses.dataclass(frozen=True)
class FusedAttention:
    """An attention, or a part of its gradient, that one kernel computes.

    Attributes:
      keys: number of keys of a row.
      is_gradient: whether it is a part of the backward pass.
      head_dim: size of a head of queries.
    """

    keys: int
    is_gradient: bool
    is_cudnn: bool
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction of one device's compiled program. A fusion is one operation.

    Attributes:
      opcode: HLO's opcode without "-start", such as "fusion", "convolution", "all-to-all".
      layer: name scopes of the layer, such as "encoder/layers_0/feed_forward"; may be empty.
      phase: one of PHASES.
      times: number of executions per step: the product of the trip counts of all loops around it.
      matmul_flops: FLOPs of one execution's matrix products and convolutions. A multiply-add
        counts as two.
      other_flops: elements that one execution's elementwise operations and reductions process.
      dtype: NumPy's name of the type of the matrix product's operands; "" without a product.
      passes: passes of a TPU's matrix unit for each product, by its precision: 1, 3 or 6.
      bytes: bytes that one execution reads from and writes to the device's main memory.
      collective: the data that it moves between devices, if any.
      dispatch: whether its matrix product only moves tokens to experts or back.
      op_name: TensorFlow's name of the operation that the compiler made it for; may be empty.
      attention: the attention that it computes as one kernel, if any.
      is_grouped: whether it computes the products of several groups of rows as one kernel.
      host: the data that it moves between device and host, if any.
      in_flight: names of the operations whose collectives or transfers to and from the host move
        data while this operation runs. They were started before, and asynchronously.
    """

    name: str
    opcode: str
    layer: str
    phase: str
    times: int = 1
    matmul_flops: int = 0
    other_flops: int = 0
    dtype: str = ""
    passes: int = 1
    bytes: int = 0
    collective: Collective | None = None
    dispatch: bool = False
    op_name: str = ""
    attention: FusedAttention | None = None
    is_grouped: bool = False
    host: HostTransfer | None = None
    in_flight: tuple[str, ...] = ()


def collective_calls(operations: Iterable[Operation]) -> list[CollectiveCall]:
    """Returns the collectives among operations, in the same order."""
    return [
        CollectiveCall(
            **vars(operation.collective),
            op_name=operation.op_name,
            layer=operation.layer,
            phase=operation.phase,
            times=operation.times,
        )
        for operation in operations
        if operation.collective
    ]


def count_by_kind(calls: Iterable[CollectiveCall]) -> dict[str, int]:
    """Returns the number of collectives of each kind in the program. One in a loop counts once."""
    return dict(collections.Counter(call.kind for call in calls))


def count_per_step(calls: Iterable[CollectiveCall]) -> dict[str, int]:
    """Returns the number of executed collectives of each kind per step, all iterations included."""
    counts: collections.Counter[str] = collections.Counter()
    for call in calls:
        counts[call.kind] += call.times
    return dict(counts)
