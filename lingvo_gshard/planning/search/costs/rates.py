"""Rates: speed of a device and its links for the cost model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from lingvo_gshard.sharding.mesh import Mesh

# collective_seconds(kind, bytes, axes, mesh): time of a collective along mesh axes. `kind` is as in
# HLO; `bytes` is the larger of operand and result on one device.
CollectiveSeconds = Callable[[str, int, tuple[str, ...], Mesh], float]


@dataclasses.dataclass(frozen=True)
class Rates:
    """Speed and memory of one device.

    Attributes:
      flops_per_second: rate of matrix products by dtype; a multiply-add counts 2.
      bytes_per_second: memory bandwidth.
      capacity: bytes that a program may use.
      collective_seconds: time of a collective.
    """

    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    capacity: int
    collective_seconds: CollectiveSeconds

    def matmul_seconds(self, flops: int, bytes: int, dtype: str) -> float:
        """Returns the time of a matrix product, limited by arithmetic or by memory bandwidth."""
        rate = self.flops_per_second.get(dtype) or min(self.flops_per_second.values())
        return max(flops / rate, bytes / self.bytes_per_second)

    def memory_seconds(self, bytes: int) -> float:
        """Returns the time to read or write this many bytes."""
        return bytes / self.bytes_per_second
