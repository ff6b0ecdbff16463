"""Which devices compute which experts, and how many rows each gets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning

# Marks a place on a device without an expert.
EMPTY = -1


@dataclasses.dataclass(frozen=True)
class ExpertDevices:
    """The devices that compute the experts of one layer.

    The experts are split into parts, one on each device along `expert_axes`. Along the other axes
    of the groups, the *slices*, every device has all of its part's experts for its slice's tokens.

    Attributes:
      mesh: the mesh.
      group_axes: axes that split the groups, the major one first.
      expert_axes: axes that split the experts.
      num_experts: size of E.
    """

    mesh: Mesh
    group_axes: tuple[str, ...]
    expert_axes: tuple[str, ...]
    num_experts: int

    @classmethod
    def of(
        cls, partitioning: Partitioning, path: str, num_experts: int, is_dropless: bool
    ) -> ExpertDevices:
        """Returns the devices of a layer.

        Args:
          partitioning: mesh and strategy.
          path: path of the layer.
          num_experts: size of E.
          is_dropless: whether it has a DroplessDispatch, whose devices have all experts along axes
            that do not split groups.
        """
        groups = tuple(partitioning.split("GSM", path=path)[0])
        experts = tuple(partitioning.split("EGCM", path=path)[0])
        if is_dropless:
            experts = tuple(axis for axis in experts if axis in groups)
        return cls(partitioning.mesh, groups, experts, num_experts)

    @property
    def parts(self) -> int:
        """The number of parts of the experts."""
        return self.mesh.parts(self.expert_axes)

    @property
    def slices(self) -> int:
        """The number of devices with the same experts and other tokens."""
        return self.mesh.parts([axis for axis in self.group_axes if axis not in self.expert_axes])

    @property
    def sources(self) -> int:
        """The number of devices that send rows to one device, itself included."""
        return self.mesh.parts([axis for axis in self.group_axes if axis in self.expert_axes])

    @property
    def places(self) -> int:
        """The number of experts of a part, rounded up."""
        return -(-self.num_experts // self.parts)

    def contiguous(self) -> np.ndarray:
        """Returns the experts of each part as runs have them, [parts, places]; EMPTY at the end."""
        experts = np.full(self.parts * self.places, EMPTY)
        experts[: self.num_experts] = np.arange(self.num_experts)
        return experts.reshape(self.parts, self.places)

    def by_source(self, by_part: np.ndarray) -> np.ndarray | None:
        """Returns the rows [slices, sources, E] that each device sends to each expert.

        Args:
          by_part: [n, E], rows of n equal parts of the groups, in their order.

        Returns:
          None if the groups of a device are not whole parts, or there are none.
        """
        sizes = [self.mesh.axis_size(axis) for axis in self.group_axes]
        devices = math.prod(sizes)
        if not len(by_part) or len(by_part) % devices:
            return None
        by_device = by_part.reshape(devices, -1, by_part.shape[1]).sum(1)
        shaped = by_device.reshape(*sizes, by_part.shape[1])
        own = [i for i, axis in enumerate(self.group_axes) if axis not in self.expert_axes]
        others = [i for i in range(len(sizes)) if i not in own]
        ordered = shaped.transpose(*own, *others, len(sizes))
        return ordered.reshape(self.slices, self.sources, -1)


def rows_by_device(rows: np.ndarray, placement: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
    """Returns the rows [..., parts, places] of each expert on each part of a placement.

    An expert in several places computes an equal share of its rows in each.

    Args:
      rows: [..., E], the rows of each expert.
      placement: [parts, places], the expert in each place, or EMPTY.
    """
    places = np.asarray(placement)
    copies = np.bincount(places[places != EMPTY], minlength=rows.shape[-1])
    shares = rows / np.maximum(copies, 1)
    with_empty = np.concatenate([shares, np.zeros((*rows.shape[:-1], 1))], -1)
    return with_empty[..., places]
