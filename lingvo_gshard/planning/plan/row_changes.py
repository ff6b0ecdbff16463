"""Differences between the rows of two plans: collectives, tensors, layers, temporaries."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gshard.planning.plan.change import (
    SMALLEST_TIME_CHANGE,
    Change,
    changed_fields,
    has_moved,
    paired,
)
from lingvo_gshard.planning.plan.plan import (
    CollectiveRow,
    LayerRow,
    Remedy,
    TemporaryRow,
    TensorRow,
)

_TENSOR_FIELDS = {
    "layer": "", "layout": "", "shape": "", "dtype": "", "split": "", "bytes": "bytes",
    "bytes_per_device": "bytes",
}  # fmt: skip
_LAYER_FIELDS = {
    "flops": "flops", "bytes": "bytes", "seconds_bound": "seconds", "seconds": "seconds",
    "compute_seconds": "seconds", "memory_seconds": "seconds", "communication_seconds": "seconds",
}  # fmt: skip
_REMEDY_FIELDS = {"fits": "", "peak": "bytes", "seconds_per_step": "seconds"}


@dataclasses.dataclass(frozen=True)
class _CollectiveTotals:
    """Sums over the calls of one kind of collective in one layer and phase.

    Attributes:
      dtype: all element types.
      count: number of calls.
      bytes: bytes of all calls.
      calls: number of calls of each size, in words.
      seconds_bound: lower bound of all calls.
      seconds: estimate of all calls.
    """

    dtype: str
    count: int
    bytes: int
    calls: str
    seconds_bound: float
    seconds: float

    def __str__(self) -> str:
        calls = "1 call" if self.count == 1 else f"{self.count:,} calls"
        return f"{calls}, {self.bytes:,} bytes in total, {self.dtype}"


def collectives(
    before: Iterable[CollectiveRow], after: Iterable[CollectiveRow]
) -> Iterator[Change]:
    """Yields changed collectives; calls of one kind, axis, layer and phase are added up."""
    old, new = (_collective_totals(rows) for rows in (before, after))
    for key in dict.fromkeys((*old, *new)):
        kind, axis, layer, phase = key
        what = f"{kind} over {axis} in {layer or 'no layer'} ({phase})"
        first, second = old.get(key), new.get(key)
        if first is None or second is None:
            yield Change("collectives", what, "", first and str(first), second and str(second))
            continue
        units = {"dtype": "", "count": "count", "bytes": "bytes"}
        changes = [*changed_fields("collectives", what, first, second, units)]
        if not changes:
            changes = [*changed_fields("collectives", what, first, second, {"calls": ""})]
        yield from changes
        for field in ("seconds_bound", "seconds"):
            if has_moved(getattr(first, field), getattr(second, field)):
                yield from changed_fields("collectives", what, first, second, {field: "seconds"})


def tensors(before: Sequence[TensorRow], after: Sequence[TensorRow]) -> Iterator[Change]:
    """Yields weights and moments that were added, removed, resized or sharded differently."""
    for what, old, new in paired(before, after, lambda row: f"{row.path} ({row.kind})"):
        if old is None or new is None:
            yield Change("tensors", what, "", old and _tensor_text(old), new and _tensor_text(new))
        else:
            yield from changed_fields("tensors", what, old, new, _TENSOR_FIELDS)


def layers(before: Sequence[LayerRow], after: Sequence[LayerRow]) -> Iterator[Change]:
    """Yields changed layers; those whose time barely changes are added up."""
    small: list[tuple[LayerRow, LayerRow]] = []
    for what, old, new in paired(before, after, _layer_name):
        if old is None or new is None:
            yield Change("layers", what, "", old and old.seconds, new and new.seconds, "seconds")
            continue
        yield from changed_fields("layers", what, old, new, {"times": "count"})
        moved = {
            field: unit
            for field, unit in _LAYER_FIELDS.items()
            if has_moved(getattr(old, field), getattr(new, field))
        }
        yield from changed_fields("layers", what, old, new, moved)
        if not moved and [*changed_fields("layers", what, old, new, _LAYER_FIELDS)]:
            small.append((old, new))
    if small:
        sums = [sum(row.seconds for row in rows) for rows in zip(*small, strict=True)]
        what = f"{len(small)} more, each by at most {SMALLEST_TIME_CHANGE:.0%}"
        yield Change("layers", what, "seconds", *sums, "seconds")
    orders = [[_layer_name(row) for row in rows] for rows in (before, after)]
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        pairs = enumerate(zip(*orders, strict=True), 1)
        position, first = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        yield Change("layers", f"order of execution, first changed at {position}", "", *first)


def temporaries(before: Sequence[TemporaryRow], after: Sequence[TemporaryRow]) -> Iterator[Change]:
    """Yields changed temporaries, paired by shape and layer.

    Their names do not pair them: the compiler numbers instructions anew in every program.
    """
    for what, old, new in paired(
        before, after, lambda row: f"{_shape_text(row)} in {row.layer or 'no layer'}"
    ):
        sizes = old and old.bytes, new and new.bytes
        if sizes[0] != sizes[1]:
            yield Change("temporaries", what, "", *sizes, "bytes")


def remedies(before: Sequence[Remedy], after: Sequence[Remedy]) -> Iterator[Change]:
    """Yields suggested changes that were added or removed, or have another result."""
    for what, old, new in paired(before, after, lambda row: row.change):
        if old is None or new is None:
            yield Change("remedies", what, "", *(row and _fit_text(row) for row in (old, new)))
        else:
            yield from changed_fields("remedies", what, old, new, _REMEDY_FIELDS)


def notes(before: Sequence[str], after: Sequence[str]) -> Iterator[Change]:
    """Yields notes that only one plan has."""
    for what, old, new in paired(before, after, str):
        if old is None or new is None:
            yield Change("notes", what, "", old, new)


def _collective_totals(rows: Iterable[CollectiveRow]) -> dict[tuple, _CollectiveTotals]:
    groups: dict[tuple, list[CollectiveRow]] = collections.defaultdict(list)
    for row in rows:
        groups[row.kind, row.axis, row.layer, row.phase].append(row)
    return {
        key: _CollectiveTotals(
            dtype=", ".join(sorted({row.dtype for row in group})),
            count=sum(row.count for row in group),
            bytes=sum(row.count * row.bytes for row in group),
            calls=_calls_text(group),
            seconds_bound=sum(row.seconds_bound for row in group),
            seconds=sum(row.seconds for row in group),
        )
        for key, group in groups.items()
    }


def _calls_text(rows: Iterable[CollectiveRow]) -> str:
    counts: collections.Counter[int] = collections.Counter()
    for row in rows:
        counts[row.bytes] += row.count
    return ", ".join(f"{count} of {size}" for size, count in sorted(counts.items()))


def _tensor_text(row: TensorRow) -> str:
    return f"{_shape_text(row)} {row.split}"


def _shape_text(row: TensorRow | TemporaryRow) -> str:
    return f"{row.dtype}[{','.join(map(str, row.shape))}]"


def _layer_name(row: LayerRow) -> str:
    return f"{row.layer or 'no layer'} ({row.phase})"


def _fit_text(row: Remedy) -> str:
    return "fits" if row.fits else "does not fit"
