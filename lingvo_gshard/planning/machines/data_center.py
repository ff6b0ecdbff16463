"""Notes on what a step sends over the data-center network, which joins TPU slices."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.roofline import TimedOperation

# Phases in which a sum over data-parallel axes has no place.
_PHASES = ("forward", "rematerialized")
# Layers also count tokens and sum losses, which takes a smaller share of a step than this.
_LEAST_SHARE = 0.01


def notes(timed: Sequence[TimedOperation], topology: Topology) -> tuple[str, ...]:
    """Returns notes for the plan of a step on several slices.

    Args:
      timed: the operations of the step.
      topology: the machine.
    """
    if topology.slices == 1:
        return ()
    chip = topology.chip
    rate = chip.network_bandwidth * chip.partitions * 8 / 1e9
    found = [
        f"{topology.slices} slices, joined by the data-center network at {rate:g} Gbit/s for each "
        f"chip: {chip.sources['network_bandwidth']}. Its latency and the copies to and from the "
        "hosts are not published and are left out"
    ]
    return (*found, *_notes_on_layers(timed))


def _notes_on_layers(timed: Sequence[TimedOperation]) -> list[str]:
    """Returns a note for each mesh axis over which layers send activations across slices."""
    seconds: dict[str, float] = {}
    for each in timed:
        collective = each.operation.collective
        if collective and collective.slices > 1 and each.operation.phase in _PHASES:
            axes = ",".join(collective.axes) or "all"
            seconds[axes] = seconds.get(axes, 0.0) + each.seconds
    return [
        f"axis {axes} crosses slices, and layers communicate over it in the forward pass: "
        f"{amount * 1e3:.3g} ms a step over the data-center network. The leading axes of --mesh "
        "cross slices: put one first that only sums gradients, such as a replicated data axis"
        for axes, amount in seconds.items()
        if amount >= _LEAST_SHARE * sum(each.seconds for each in timed)
    ]
