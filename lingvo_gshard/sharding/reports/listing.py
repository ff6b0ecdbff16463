"""Tables of how each weight and optimizer moment is sharded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.strategies import Split

REPLICATED = "replicated"


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """The sharding of one weight or optimizer moment.

    Attributes:
      path: Path of the weight.
      layout: Letters of the weight.
      shape: Shape of the full tensor.
      dtype: Name of the type.
      split: The split as text, such as "E over data (8), H over model (2)", or "replicated".
      bytes: Size of the full tensor.
      bytes_per_device: Size of the shard on one device.
      note: Names dimensions that do not divide evenly and are therefore not split. May be empty.
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
    """Returns one row for each weight or optimizer moment.

    Args:
      specs: The weights or moments.
      partitioning: How they are split.
      kind: "weights" or "moments".
    """
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
    stored = partitioning.storage_split(spec.shape, wanted)
    size = math.prod(spec.shape) * tf.as_dtype(spec.dtype).size
    return WeightRow(
        path=spec.path,
        layout=spec.layout,
        shape=spec.shape,
        dtype=spec.dtype,
        split=split_in_words(spec.layout, stored, partitioning),
        bytes=size,
        bytes_per_device=size // math.prod(partitioning.parts(axes) for axes in stored),
        note=_note(spec, wanted, stored, partitioning),
    )


def _note(spec: VariableSpec, wanted: Split, stored: Split, partitioning: Partitioning) -> str:
    return "; ".join(
        f"{letter} of {size} does not divide by {partitioning.parts(axes)}: not split"
        for letter, size, axes, stored_axes in zip(
            spec.layout, spec.shape, wanted, stored, strict=True
        )
        if axes and not stored_axes
    )
