"""Rates: what a device and its links do in a second, as the cost model needs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from lingvo_gshard.sharding.mesh import Mesh

# collective_seconds(kind, bytes, axes, mesh): kind as in HLO; bytes of the larger of one device's
# operand and result; over all groups of devices along the axes.
CollectiveSeconds = Callable[[str, int, tuple[str, ...], Mesh], float]


@dataclasses.dataclass(frozen=True)
class Rates:
    """One device of a topology.

    flops_per_second: of matrix products, by the type of their operands; a multiply-add is two.
    bytes_per_second: to and from its memory. capacity: bytes of it that a program may use.
    """

    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    capacity: int
    collective_seconds: CollectiveSeconds

    def product_seconds(self, flops: int, bytes: int, dtype: str) -> float:
        """Returns the time of a matrix product: what takes longer, computing or reading."""
        rate = self.flops_per_second.get(dtype) or min(self.flops_per_second.values())
        return max(flops / rate, bytes / self.bytes_per_second)

    def memory_seconds(self, bytes: int) -> float:
        """Returns the time of reading or writing so many bytes."""
        return bytes / self.bytes_per_second
