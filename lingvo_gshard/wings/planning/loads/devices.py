"""Places experts on devices, and counts how many rows each device gets.

Every device gets the same number of experts, since weights are stored evenly. To minimize the
largest load under this condition is the k-partitioning problem (Babel, Kellerer and Kotov 1998,
https://doi.org/10.1007/BF01193837), which is NP-hard. The heuristic is Graham's longest processing
time first (1969, https://doi.org/10.1137/0117039) under this condition. Experts are taken in the
order of their loads, the largest first. Each goes to the device with the smallest load that has
room. Swaps of two experts then lower the largest load, until no swap lowers it.

Replicas follow the expert-parallel load balancer of DeepSeek-V3 (arXiv 2412.19437, section 3.4,
https://github.com/deepseek-ai/EPLB): each further copy goes to the expert with the largest load per
copy, and an expert's rows are divided evenly over its copies.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.sharding import Mesh, Partitioning

# Marks a place on a device without an expert.
EMPTY = -1


@dataclasses.dataclass(frozen=True)
class ExpertDevices:
    """The devices that compute the experts of one layer.

    The experts are split into parts, one on each device along `expert_axes`. The other axes of the
    groups divide the devices into *slices*. Each slice holds all parts, and computes the tokens of
    its own groups. In `group_axes`, the major axis comes first.
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

        `by_part` [n, E] has the rows of n equal parts of the groups, in their order. Returns None
        if the groups of a device are not whole parts, or there are none.
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


def place(load: np.ndarray, parts: int, replicas: int = 0) -> np.ndarray:
    """Returns the experts of each device, [parts, places]; EMPTY where a device has one fewer.

    Args:
      load: [E], the load of each expert.
      replicas: number of further copies of experts, on all devices together.
    """
    experts, shares = _padded_copies(load, replicas, parts)
    members = _swapped(shares, _longest_first(shares, parts, len(shares) // parts))
    return np.sort(experts[members], axis=1)


def _padded_copies(load: np.ndarray, replicas: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `copies` does, with EMPTY and no load to fill all places of all devices."""
    experts, shares = copies(load, replicas, parts)
    spare = -len(experts) % parts
    return np.append(experts, np.full(spare, EMPTY)), np.append(shares, np.zeros(spare))


def copies(load: np.ndarray, replicas: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the expert of each copy, [E + replicas], and the load of each copy.

    Args:
      load: [E], the load of each expert.
      most: copies that an expert can have, which is the number of devices.
    """
    counts = np.ones(len(load), int)
    heap = [(-float(value), expert) for expert, value in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(replicas):
        _, expert = heap[0]
        counts[expert] += 1
        if counts[expert] == most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-float(load[expert]) / counts[expert], expert))
    experts = np.repeat(np.arange(len(load)), counts)
    return experts, np.asarray(load, float)[experts] / counts[experts]


def least_largest(load: np.ndarray, parts: int, replicas: int = 0) -> float:
    """Returns a lower bound of the largest load of a device under any placement of the copies.

    The bound is the larger of two loads: the mean load of a device, and the load of a device that
    has the largest copy and otherwise only the smallest copies.
    """
    ascending = np.sort(_padded_copies(load, replicas, parts)[1])
    others = ascending[: len(ascending) // parts - 1].sum()
    return max(float(np.sum(load)) / parts, float(ascending[-1] + others))


def _longest_first(shares: np.ndarray, parts: int, places: int) -> np.ndarray:
    """Returns the copies of each device, [parts, places], by Graham's rule."""
    members: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, part) for part in range(parts)]
    for copy in np.argsort(-shares, kind="stable").tolist():
        total, part = heapq.heappop(heap)
        members[part].append(copy)
        if len(members[part]) < places:
            heapq.heappush(heap, (total + float(shares[copy]), part))
    return np.array(members)


def _swapped(shares: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Returns the copies of each device after swaps between two devices.

    Each swap lowers the larger load of its two devices. One of the two is always the device with
    the largest load of all.
    """
    members = members.copy()
    loads = shares[members].sum(1)
    # Differences of rounding alone are no reason to swap.
    least = 1e-12 * max(float(loads.sum()), 1.0)
    for _ in range(members.size):
        worst = int(loads.argmax())
        # [places, parts, places]: by how much less the worst device has after each swap.
        moved = shares[members[worst]][:, None, None] - shares[members][None]
        larger = np.maximum(loads[worst] - moved, loads[None, :, None] + moved)
        larger[:, worst] = np.inf
        place, part, other = np.unravel_index(larger.argmin(), larger.shape)
        if larger[place, part, other] >= loads[worst] - least:
            break
        members[worst, place], members[part, other] = members[part, other], members[worst, place]
        loads = shares[members].sum(1)
    return members
