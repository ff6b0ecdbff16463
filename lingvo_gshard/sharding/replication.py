"""What every device holds whole although the strategy splits a letter of it: no silent fallback."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import tensorflow as tf

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.sharding.partitioning import Partitioning


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A weight or moment that is whole on every device, its bytes, and why."""

    path: str
    shape: tuple[int, ...]
    bytes: int
    reason: str


def replicated(
    specs: Iterable[VariableSpec], partitioning: Partitioning, kind: str = "weights", least: int = 0
) -> list[Replicated]:
    """Returns the specs of `least` bytes or more that are whole although some letter is split.

    kind: 'weights' or 'moments'. Largest first.
    """
    found = []
    for spec in specs:
        size = math.prod(spec.shape) * tf.as_dtype(spec.dtype).size
        stored = partitioning.spec_storage_split(spec, kind)
        whole = all(partitioning.parts(axes) == 1 for axes in stored)
        reasons = _reasons(spec, partitioning, kind)
        if whole and reasons and size >= least:
            found.append(Replicated(spec.path, spec.shape, size, "; ".join(reasons)))
    return sorted(found, key=lambda row: -row.bytes)


def check_replicated(found: Iterable[Replicated], most_megabytes: float) -> None:
    """Raises ValueError naming --max_replicated_mb and the tensors if they are larger together."""
    rows = list(found)
    total = sum(row.bytes for row in rows) / 2**20
    if total > most_megabytes:
        shown = "\n".join(f"  {describe(row)}" for row in rows[:10])
        more = f"\n  and {len(rows) - 10} more" if len(rows) > 10 else ""
        raise ValueError(
            f"--max_replicated_mb={most_megabytes:g}: every device would hold {total:.1f} MiB "
            f"whole although the strategy splits a letter of them:\n{shown}{more}"
        )


def describe(row: Replicated) -> str:
    """Returns a row as a line of text."""
    return f"{row.path} {list(row.shape)}, {row.bytes / 2**20:.1f} MiB: {row.reason}"


def _reasons(spec: VariableSpec, partitioning: Partitioning, kind: str) -> list[str]:
    """Why letters that the strategy splits are not split in this tensor, one by one."""
    rules = partitioning.strategy.table(kind)
    wanted = partitioning.spec_split(spec, kind)
    reasons = []
    for letter, size, axes in zip(spec.layout, spec.shape, wanted, strict=True):
        parts = partitioning.parts(axes)
        if axes and size % parts:
            reasons.append(f"{letter} of {size} does not divide by {parts}")
        elif letter in spec.unsplit and partitioning.parts(rules.get(letter, ())) > 1:
            reasons.append(f"the layer keeps {letter} whole")
        elif not axes and partitioning.parts(rules.get(letter, ())) > 1:
            reasons.append(f"an override keeps {letter} whole")
    return reasons
