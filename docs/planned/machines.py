"""Machines of the table, and the slices of each that are tried, the smallest first."""

from __future__ import annotations

import dataclasses

_PLANE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_HOSTS = ("1x1", "1x2", "1x4", "1x8", "2x8", "4x8", "8x8", "16x8", "32x8")


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of machine.

    Attributes:
      key: the beginning of its topologies' names.
      name: what it is called.
      shapes: the slices that are tried, the smallest first.
    """

    key: str
    name: str
    shapes: tuple[str, ...]

    @property
    def topologies(self) -> tuple[str, ...]:
        """The names of the slices."""
        return tuple(f"{self.key}:{shape}" for shape in self.shapes)


MACHINES = (
    Machine("v5p", "TPU v5p", _CUBE),
    Machine("v6e", "TPU v6e", _PLANE),
    Machine("gpu:h100", "H100", _HOSTS),
    Machine("v5e", "TPU v5e", _PLANE),
    Machine("tpu7x", "TPU7x", _CUBE),
)
