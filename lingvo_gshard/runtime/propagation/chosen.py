"""The sharding of a tensor in a program whose shardings XLA has chosen."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import msgspec

from lingvo_gshard.hlo.module import Instruction
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

WHOLE = "whole"


class Chosen(msgspec.Struct, frozen=True):
    """How a tensor is divided.

    Attributes:
      tiles: number of parts of each dimension.
      split: mesh axes of each dimension; None if no axes can express it.
    """

    tiles: tuple[int, ...]
    split: Split | None

    @property
    def parts(self) -> int:
        """Number of different parts; 1 means that every device holds all."""
        return math.prod(self.tiles)

    def bytes_on_device(self, shape: Sequence[int], itemsize: int) -> int:
        """Returns the bytes of the largest part of a tensor of this shape."""
        pairs = zip(shape, self.tiles, strict=True)
        return itemsize * math.prod(-(-size // parts) for size, parts in pairs)

    def in_words(self, layout: str = "") -> str:
        """Returns the division as text, such as "B over data, H over model" or "whole".

        Args:
          layout: letters of the dimensions; by default they are numbered from 0.
        """
        if self.split is not None:
            return split_in_words(self.split, layout)
        pairs = zip(_names(layout, len(self.tiles)), self.tiles, strict=True)
        return ", ".join(f"{name} in {parts}" for name, parts in pairs if parts > 1) or WHOLE


def split_in_words(split: Split, layout: str = "") -> str:
    """Returns a split as text, such as "B over data, H over model" or "whole".

    Args:
      split: mesh axes of each dimension.
      layout: letters of the dimensions; by default they are numbered from 0.
    """
    pairs = zip(_names(layout, len(split)), split, strict=True)
    return ", ".join(f"{name} over {' and '.join(axes)}" for name, axes in pairs if axes) or WHOLE


def _names(layout: str, rank: int) -> list[str]:
    letters = layout or "_" * rank
    return [f"dimension {i}" if letter == "_" else letter for i, letter in enumerate(letters)]


def chosen(instruction: Instruction, mesh: Mesh) -> Chosen | None:
    """Returns the sharding of an instruction's array.

    Returns:
      The sharding. None for tuples, for tensors of one device, and in manual regions, where each
      device has a tensor of its own.
    """
    if instruction.shape.elements is not None:
        return None
    rank = len(instruction.shape.dimensions)
    if not instruction.proto.HasField("sharding"):
        # The partitioner replicates what propagation has left open.
        return Chosen((1,) * rank, ((),) * rank)
    return _read(instruction.proto.sharding.SerializeToString(), rank, mesh)


@functools.lru_cache(maxsize=2**12)
def _read(serialized: bytes, rank: int, mesh: Mesh) -> Chosen | None:
    tiles = xla.tiles_of(serialized, rank)
    return None if tiles is None else Chosen(tiles, xla.split_of(serialized, rank, mesh))
