"""Places experts on devices so that the loads of the devices are even.

Every device gets the same number of experts, since weights are stored evenly. To minimize the
largest load under this condition is the k-partitioning problem (Babel, Kellerer and Kotov 1998,
https://doi.org/10.1007/BF01193837), which is NP-hard. The heuristic is the one of Graham 1969
(https://doi.org/10.1137/0117039), longest processing time first, with this condition: experts in
the order of their loads, the largest first, go to the device with the smallest load that has room.
Swaps of two experts then lower the largest load as long as any does.

Replicas follow the expert-parallel load balancer of DeepSeek-V3 (arXiv 2412.19437, section 3.4,
https://github.com/deepseek-ai/EPLB): each further copy goes to the expert with the largest load per
copy, and an expert's rows are divided evenly over its copies.
"""

from __future__ import annotations

import heapq

import numpy as np

from lingvo_gshard.planning.loads.devices import EMPTY


def place(load: np.ndarray, parts: int, replicas: int = 0) -> np.ndarray:
    """Returns the experts of each device, [parts, places]; EMPTY where a device has one fewer.

    Args:
      load: [E], the load of each expert.
      parts: number of devices.
      replicas: number of further copies of experts, on all devices together.
    """
    experts, shares = copies(load, replicas, parts)
    places = -(-len(experts) // parts)
    spare = parts * places - len(experts)
    experts = np.concatenate([experts, np.full(spare, EMPTY)])
    shares = np.concatenate([shares, np.zeros(spare)])
    members = _longest_first(shares, parts, places)
    members = _swapped(shares, members)
    return np.sort(experts[members], axis=1)


def copies(load: np.ndarray, replicas: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the expert of each copy, [E + replicas], and the load of each copy.

    Args:
      load: [E], the load of each expert.
      replicas: number of further copies.
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

    It is the mean load of a device, or the load of the one that has the largest copy, if all others
    that it has are the smallest ones.
    """
    _, shares = copies(load, replicas, parts)
    places = -(-len(shares) // parts)
    spare = parts * places - len(shares)
    ascending = np.sort(np.concatenate([shares, np.zeros(spare)]))
    return max(float(np.sum(load)) / parts, float(ascending[-1] + ascending[: places - 1].sum()))


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
    """Returns the copies after swaps, each of which lowers the larger load of two devices.

    One of the two devices is always the one with the largest load.
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
