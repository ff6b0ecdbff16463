"""Machines that a budget can rent: every chip with a list price, in sizes that double."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.machines import chips, topologies
from lingvo_gshard.planning.machines.chips import Chip
from lingvo_gshard.planning.machines.topologies import Topology

# The largest cluster of GPUs that is tried.
_MOST_HOSTS = 4096
# Bytes per second between the GPUs of a host. Less is PCI Express, over which the rates of MFU that
# a budget assumes are out of reach.
_SLOWEST_LINK = 100e9


def machines() -> list[Topology]:
    """Returns machines of every kind of accelerator with a list price and fast links."""
    found = []
    for chip in chips.CHIPS.values():
        is_fast = chip.kind == "tpu" or chip.link_bandwidth >= _SLOWEST_LINK
        if chip.price is not None and chip.kind != "cpu" and is_fast:
            found += [topologies.get(name) for name in _names(chip)]
    return found


def named(text: str) -> list[Topology]:
    """Returns the machines of --topology: names, separated by commas.

    Raises:
      UserError: a name is no topology, or no price is published for its chip.
    """
    found = [topologies.get(name) for name in text.split(",")]
    for topology in found:
        if topology.chip.price is None:
            priced = [chip.key for chip in chips.CHIPS.values() if chip.price is not None]
            raise UserError(
                f"--topology={text}: no price of {topology.chip.name} is published, so a budget "
                f"buys no time on it; expected one of {', '.join(priced)}"
            )
    return found


def _names(chip: Chip) -> list[str]:
    if chip.kind == "gpu":
        sizes = [2**power for power in range(int(math.log2(_MOST_HOSTS)) + 1)]
        return [f"gpu:{chip.key}:{hosts}x{chip.host_chips}" for hosts in sizes]
    found, shape = [], (2, 2, 1)[: len(chip.pod_shape)]
    while _is_within(shape, chip.pod_shape):
        found.append(f"{chip.key}:{'x'.join(map(str, shape))}")
        # The last of the smallest dimensions doubles, so that slices stay near cubes.
        smallest = max(range(len(shape)), key=lambda index: (-shape[index], index))
        shape = tuple(size * (1 + (index == smallest)) for index, size in enumerate(shape))
    return found


def _is_within(shape: Sequence[int], pod: Sequence[int]) -> bool:
    return all(size <= most for size, most in zip(sorted(shape), sorted(pod), strict=True))
