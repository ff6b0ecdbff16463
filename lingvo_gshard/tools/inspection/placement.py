"""Says which part of a tensor each device of a mesh holds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a tensor, and the devices that hold it.

    Attributes:
      ranges: (first, end) of each dimension.
      devices: positions of the devices in the mesh, ascending.
    """

    ranges: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


def parts(shape: Sequence[int], split: Split, mesh: Mesh) -> list[Part]:
    """Returns the different parts of a stored tensor, the first elements first.

    Args:
      shape: shape of the whole tensor.
      split: the mesh axes that split each dimension, which must divide evenly.
      mesh: the mesh.
    """
    counts = [mesh.parts(axes) for axes in split]
    found = []
    for numbers in itertools.product(*map(range, counts)):
        index: list[int | slice] = [slice(None)] * len(mesh.names)
        for number, axes in zip(numbers, split, strict=True):
            # The first axis of a dimension is the outer one.
            sizes = [mesh.axis_size(axis) for axis in axes]
            for axis, place in zip(
                axes, np.unravel_index(number, sizes) if axes else (), strict=True
            ):
                index[mesh.names.index(axis)] = int(place)
        ranges = tuple(
            (number * (size // count), (number + 1) * (size // count))
            for number, size, count in zip(numbers, shape, counts, strict=True)
        )
        devices = np.ravel(mesh.ids[tuple(index)])
        found.append(Part(ranges, tuple(int(device) for device in devices)))
    return found
