"""Log lines about a run's partitioning: memory, collectives, and tensors that are not split."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.kernel_use import uses_in_words
from lingvo_gshard.runtime.compile_options import options_in_words
from lingvo_gshard.runtime.program.executable import PROGRAM_READERS, Executable
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import Replicated, describe

# Smaller tensors that are not split are not reported.
LEAST_BYTES = 2**20
_SHOWN = 5


def describe_program(executable: Executable) -> list[str]:
    """Returns lines about a compiled program: memory, collectives, kernels, and warnings."""
    memory = {name: size / 2**20 for name, size in executable.memory().items()}
    collectives = "; ".join(reader.collectives_in_words(executable) for reader in PROGRAM_READERS)
    lines = [
        f"{executable.program.name}: {memory['peak']:.1f} MiB per device "
        f"(arguments {memory['arguments']:.1f}, temporaries {memory['temporaries']:.1f}); "
        f"collectives: {collectives}"
    ]
    if executable.options:
        lines.append(f"compiled with {options_in_words(executable.options)}")
    lines += uses_in_words(executable.program.kernels)
    replications = executable.full_replications()
    lines += [f"Warning: {replication}" for replication in replications[:_SHOWN]]
    return lines + _more(len(replications), "tensors that are replicated to reshard them")


def unused_axis_warnings(partitioning: Partitioning) -> list[str]:
    """Returns a warning for each mesh axis that the strategy does not use."""
    return [
        f"Warning: strategy {partitioning.strategy.name} splits nothing over axis {axis}: its "
        f"{partitioning.mesh.axis_size(axis)} devices all do the same work"
        for axis in partitioning.unused_axes
    ]


def describe_unsplit(tensors: Sequence[Replicated]) -> list[str]:
    """Returns a line for each of these tensors, largest first, that is not small."""
    large = [tensor for tensor in tensors if tensor.bytes >= LEAST_BYTES]
    lines = [f"Not split: {describe(tensor)}" for tensor in large[:_SHOWN]]
    return lines + _more(len(large), "tensors that are not split")


def _more(count: int, tensors: str) -> list[str]:
    return [f"and {count - _SHOWN} more {tensors}"] if count > _SHOWN else []
