"""What a run says of its partitioning: memory, collectives, and what was not split."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.hlo import summary
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.replication import Replicated, describe

LEAST_BYTES = 2**20
_SHOWN = 5


def compiled(executable: Executable) -> list[str]:
    """Returns lines about a compiled program: its memory and collectives, and the warnings."""
    memory = {name: size / 2**20 for name, size in executable.memory().items()}
    counts = summary.count_by_kind(executable.collectives())
    collectives = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"
    lines = [
        f"{executable.program.name}: {memory['peak']:.1f} MiB per device "
        f"(arguments {memory['arguments']:.1f}, temporaries {memory['temporaries']:.1f}); "
        f"collectives: {collectives}"
    ]
    found = executable.rematerializations()
    lines += [
        f"Warning: {row.operation} is made whole on every device: from {row.before} to {row.after}"
        for row in found[:_SHOWN]
    ]
    return lines + _more(len(found), "such operations")


def unused_axes(partitioning: Partitioning) -> list[str]:
    """Returns a line for each axis over which nothing is split."""
    return [
        f"Warning: strategy {partitioning.strategy.name} splits nothing over axis {axis}: its "
        f"{partitioning.mesh.axis_size(axis)} devices all compute the same"
        for axis in partitioning.unused_axes
    ]


def not_split(found: Sequence[Replicated], least: int = LEAST_BYTES) -> list[str]:
    """Returns a line for each tensor of `least` bytes or more that is whole on every device."""
    large = [row for row in found if row.bytes >= least]
    lines = [f"Not split: {describe(row)}" for row in large[:_SHOWN]]
    return lines + _more(len(large), "tensors that are not split")


def _more(count: int, what: str) -> list[str]:
    return [f"and {count - _SHOWN} more {what}"] if count > _SHOWN else []
