"""Tables of how each weight and optimizer moment is sharded.

The runtime reports them, so that a strategy never falls back to replication silently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from lingvo_gshard.core import NestedMap, UserError, VariableSpec, tf
from lingvo_gshard.sharding.partitioning import MASTERS, Partitioning
from lingvo_gshard.sharding.strategies import Split

REPLICATED = "replicated"


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """The sharding of one weight or optimizer moment.

    Attributes:
      shape: Shape of the full tensor.
      split: The split as text, such as "E over data (8), H over model (2)", or "replicated".
      bytes: Size of the full tensor.
      bytes_per_device: Size of the shard on one device.
      note: Names dimensions that do not divide evenly, and are not split or padded. May be empty.
    """

    path: str
    layout: str
    shape: tuple[int, ...]
    dtype: str
    split: str
    bytes: int
    bytes_per_device: int
    note: str


def weight_rows(
    specs: NestedMap | Iterable[VariableSpec], partitioning: Partitioning, kind: str = "weights"
) -> list[WeightRow]:
    """Returns one row for each of the "weights" or "moments"."""
    flat = specs.flatten() if isinstance(specs, NestedMap) else specs
    return [_row(spec, partitioning, kind) for spec in flat]


def split_in_words(layout: str, split: Split, partitioning: Partitioning) -> str:
    """Returns a split as text, such as "E over data (8)" or "replicated"."""
    phrases = []
    for letter, axes in zip(layout, split, strict=True):
        if axes:
            sizes = " x ".join(str(partitioning.mesh.axis_size(axis)) for axis in axes)
            phrases.append(f"{letter} over {' and '.join(axes)} ({sizes})")
    return ", ".join(phrases) or REPLICATED


def _row(spec: VariableSpec, partitioning: Partitioning, kind: str) -> WeightRow:
    wanted = partitioning.spec_split(spec, kind)
    stored = partitioning.state_split(spec.shape, wanted)
    itemsize = tf.as_dtype(spec.dtype).size
    size = math.prod(spec.shape) * itemsize
    size_in_storage = math.prod(partitioning.stored_shape(spec.shape, stored)) * itemsize
    return WeightRow(
        path=spec.path,
        layout=spec.layout,
        shape=spec.shape,
        dtype=spec.dtype,
        split=split_in_words(spec.layout, stored, partitioning),
        bytes=size,
        bytes_per_device=size_in_storage // math.prod(map(partitioning.parts, stored)),
        note=_note(spec, wanted, stored, partitioning),
    )


def _note(spec: VariableSpec, wanted: Split, stored: Split, partitioning: Partitioning) -> str:
    in_storage = partitioning.stored_shape(spec.shape, stored)
    rows = zip(spec.layout, spec.shape, wanted, stored, in_storage, strict=True)
    notes = []
    for letter, size, axes, stored_axes, stored_size in rows:
        if axes and not stored_axes:
            parts = partitioning.parts(axes)
            notes.append(f"{letter} of {size} does not divide by {parts}: not split")
        elif stored_size != size:
            notes.append(f"{letter} of {size} is padded to {stored_size}")
    return "; ".join(notes)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A weight or moment that every device stores in full."""

    path: str
    shape: tuple[int, ...]
    bytes: int
    reason: str


def replicated(
    specs: Iterable[VariableSpec], partitioning: Partitioning, kind: str = "weights", least: int = 0
) -> list[Replicated]:
    """Returns the replicated tensors with a letter that the strategy splits, the largest first.

    Args:
      kind: "weights" or "moments".
      least: Bytes below which a tensor is left out.
    """
    found = []
    for spec in specs:
        size = math.prod(spec.shape) * tf.as_dtype(spec.dtype).size
        stored = partitioning.spec_storage_split(spec, kind)
        is_replicated = all(partitioning.parts(axes) == 1 for axes in stored)
        reasons = _reasons(spec, partitioning, kind)
        if is_replicated and reasons and size >= least:
            found.append(Replicated(spec.path, spec.shape, size, "; ".join(reasons)))
    return sorted(found, key=lambda row: -row.bytes)


def check_replicated(found: Iterable[Replicated], most_megabytes: float) -> None:
    """Checks the total size of replicated tensors.

    Args:
      most_megabytes: Largest total size in MiB.

    Raises:
      UserError: They are larger. The message names `max_replicated_mb` and the tensors.
    """
    rows = list(found)
    total = sum(row.bytes for row in rows) / 2**20
    if total > most_megabytes:
        shown = "\n".join(f"  {describe(row)}" for row in rows[:10])
        more = f"\n  and {len(rows) - 10} more" if len(rows) > 10 else ""
        raise UserError(
            f"`max_replicated_mb={most_megabytes:g}`: every device would hold {total:.1f} MiB "
            f"in full although the strategy splits a letter of them:\n{shown}{more}"
        )


def describe(row: Replicated) -> str:
    """Returns a line of text about one replicated tensor."""
    return f"{row.path} {list(row.shape)}, {row.bytes / 2**20:.1f} MiB: {row.reason}"


def _reasons(spec: VariableSpec, partitioning: Partitioning, kind: str) -> list[str]:
    """Returns a reason for each letter that the strategy splits but this tensor does not."""
    if kind == MASTERS:
        kind = partitioning.kind_of_masters(spec.layout, spec.shape, spec.path, spec.unsplit)
    rules = partitioning.strategy.table(kind)
    wanted = partitioning.spec_split(spec, kind)
    reasons = []
    for letter, size, axes in zip(spec.layout, spec.shape, wanted, strict=True):
        parts = partitioning.parts(axes)
        if axes and size % parts:
            reasons.append(f"{letter} of {size} does not divide by {parts}")
        elif letter in spec.unsplit and partitioning.parts(rules.get(letter, ())) > 1:
            reasons.append(f"the layer does not split {letter}")
        elif not axes and partitioning.parts(rules.get(letter, ())) > 1:
            reasons.append(f"an override does not split {letter}")
    return reasons
