"""What one device executes in one step, operation by operation."""

from __future__ import annotations

import dataclasses

PHASES = ("forward", "rematerialized", "backward", "optimizer", "other")


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """What a collective moves.

    kind: as in HLO, such as "all-to-all", without "-start".
    axes: names of the mesh axes over which its groups reach, in the mesh's order; empty where its
        groups are not those of axes.
    group_size: devices that take part in one group.
    bytes: of the larger of one device's operand and result.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction of one device's compiled program; a fusion is one operation.

    name: of the HLO instruction. opcode: such as "fusion", "convolution", "all-to-all".
    layer: path of the layer, `encoder/layers_0/feed_forward`, as name scopes have it; may be empty.
    phase: one of PHASES.
    times: how often it is executed in a step; the trip counts of the loops around it, multiplied.
    matmul_flops: of matrix products and convolutions, one execution; a multiply-add is two.
    other_flops: of elementwise operations and reductions, an element counting one.
    dtype: of the matrix product's operands, "" where there is none.
    passes: how often the matrix unit must run for one product, by its precision (1, 3 or 6).
    bytes: read from and written to memory, one execution.
    collective: what it moves between devices, if it does.
    dispatch: whether a matrix product in it moves tokens to experts or back, and computes nothing.
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
    collective: CollectiveCall | None = None
    dispatch: bool = False
