"""What changed between two plans."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lingvo_gshard.planning.plan import file as plan_file
from lingvo_gshard.planning.plan.file import load

__all__ = ["SECTIONS", "SMALLEST_TIME_CHANGE", "Change", "diff", "load"]

SECTIONS = (
    "setting", "headline", "memory", "collectives", "tensors", "layers", "temporaries", "remedies",
    "versions", "notes", "other",
)  # fmt: skip

# Times, and what they come from, are told layer by layer from this relative change on.
SMALLEST_TIME_CHANGE = 0.01

# What decides which program a plan is of: plans by others differ in more than what was asked for.
_COMPILER = ("lingvo_gshard", "jax", "jaxlib", "libtpu")

_SETTINGS = (
    "name", "topology", "chip", "devices", "compiler", "mesh", "strategy_name", "strategy",
    "partitioner",
)  # fmt: skip
_HEADLINES = {
    "fits": "", "seconds_per_step": "seconds", "seconds_per_step_bound": "seconds",
    "steps_per_second": "rate", "steps_per_second_bound": "rate", "tokens_per_step": "count",
    "tokens_per_second": "rate", "mfu": "share", "compile_seconds": "seconds",
}  # fmt: skip
_TENSOR_FIELDS = {
    "layer": "", "layout": "", "shape": "", "dtype": "", "split": "", "bytes": "bytes",
    "bytes_per_device": "bytes",
}  # fmt: skip
_LAYER_FIELDS = {
    "flops": "flops", "bytes": "bytes", "seconds_bound": "seconds", "seconds": "seconds",
    "compute_seconds": "seconds", "memory_seconds": "seconds", "communication_seconds": "seconds",
}  # fmt: skip
_ROWS = ("tensors", "layers", "collectives", "largest_temporaries", "remedies", "notes")

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that is not as it was.

    section: one of SECTIONS. what: the number, tensor, layer or collective. field: which of its
    fields; empty where it has but one, or is wholly new or gone. before, after: None where it is
    not there. unit: "bytes", "seconds", "flops", "count", "number", "rate", "share"; of text empty.
    """

    section: str
    what: str
    field: str
    before: Any
    after: Any
    unit: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as much it is; None of what is no number, or was 0 or not there."""
        if _is_number(self.before) and _is_number(self.after) and self.before:
            return self.after / self.before
        return None


def diff(
    before: Row,
    after: Row,
    *,
    allow_other_versions: bool = False,
    names: tuple[str, str] = ("the first plan", "the second plan"),
) -> list[Change]:
    """Returns what changed from one plan to another, section by section.

    names: of the plans' files, for messages. Raises ValueError naming the file and the reason if
    one is no plan, or, unless `allow_other_versions`, if they were made by other versions of the
    compiler or of this library.
    """
    for plan, name in zip((before, after), names, strict=True):
        plan_file.check(plan, name)
    if not allow_other_versions:
        _check_versions(before["versions"], after["versions"], names)
    changes = [
        *_fields("setting", "", before, after, dict.fromkeys(_SETTINGS, "")),
        *_fields("headline", "", before, after, _HEADLINES),
        *_groups(before, after),
        *_memory(before["bytes_per_device"], after["bytes_per_device"]),
        *_collectives(before["collectives"], after["collectives"]),
        *_tensors(before["tensors"], after["tensors"]),
        *_layers(before["layers"], after["layers"]),
        *_temporaries(before["largest_temporaries"], after["largest_temporaries"]),
        *_remedies(before.get("remedies") or [], after.get("remedies") or []),
        *_mapping("versions", "", before["versions"], after["versions"]),
        *_notes(before.get("notes") or [], after.get("notes") or []),
        *_others(before, after),
    ]
    return sorted(changes, key=lambda change: SECTIONS.index(change.section))


def _check_versions(before: Row, after: Row, names: tuple[str, str]) -> None:
    differing = [
        f"{package} {before.get(package) or 'none'} and {after.get(package) or 'none'}"
        for package in _COMPILER
        if before.get(package) != after.get(package)
    ]
    if differing:
        raise ValueError(
            f"{names[0]} and {names[1]} were made by other versions: {'; '.join(differing)}. "
            "Their compilers make different programs of the same step: plan again with the same "
            "versions, or pass --allow_other_versions"
        )


def _fields(
    section: str, what: str, before: Row, after: Row, units: dict[str, str]
) -> Iterator[Change]:
    """Changed fields of one object; `what` is empty where each field stands for itself."""
    for field, unit in units.items():
        old, new = before.get(field), after.get(field)
        if old != new:
            yield Change(section, what or field, field if what else "", old, new, unit)


def _mapping(
    section: str, prefix: str, before: Row, after: Row, unit: str = ""
) -> Iterator[Change]:
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            yield Change(section, prefix + key, "", before.get(key), after.get(key), unit)


def _groups(before: Row, after: Row) -> Iterator[Change]:
    for group, unit in (("parameters", "count"), ("flops", "flops"), ("budget", "number")):
        old, new = before.get(group) or {}, after.get(group) or {}
        yield from _mapping("headline", f"{group}.", old, new, unit)


def _memory(before: Row, after: Row) -> Iterator[Change]:
    yield from _mapping("memory", "", before, after, "bytes")


def _collectives(before: list[Row], after: list[Row]) -> Iterator[Change]:
    """By kind, axis, layer and phase: calls of one kind in one place are told together."""
    old, new = (_grouped_collectives(rows) for rows in (before, after))
    for key in dict.fromkeys((*old, *new)):
        kind, axis, layer, phase = key
        what = f"{kind} over {axis} in {layer or 'no layer'} ({phase})"
        mine, theirs = old.get(key), new.get(key)
        if mine is None or theirs is None:
            found = mine or theirs
            told = f"{found['count']} calls, {found['bytes']} bytes in all, {found['dtype']}"
            yield Change("collectives", what, "", mine and told, theirs and told)
            continue
        units = {"dtype": "", "count": "count", "bytes": "bytes"}
        changes = [*_fields("collectives", what, mine, theirs, units)]
        if not changes and mine["calls"] != theirs["calls"]:
            changes.append(Change("collectives", what, "calls", mine["calls"], theirs["calls"]))
        yield from changes
        for field in ("seconds_bound", "seconds"):
            if _moved(mine[field], theirs[field]):
                yield Change("collectives", what, field, mine[field], theirs[field], "seconds")


def _grouped_collectives(rows: Iterable[Row]) -> dict[tuple, Row]:
    groups: dict[tuple, list[Row]] = collections.defaultdict(list)
    for row in rows:
        key = tuple(str(row.get(name) or "") for name in ("kind", "axis", "layer", "phase"))
        groups[key].append(row)
    return {
        key: {
            "dtype": ", ".join(sorted({str(row.get("dtype")) for row in group})),
            "count": sum(row.get("count") or 0 for row in group),
            "bytes": sum((row.get("count") or 0) * (row.get("bytes") or 0) for row in group),
            "calls": _calls_text(group),
            "seconds_bound": sum(row.get("seconds_bound") or 0 for row in group),
            "seconds": sum(row.get("seconds") or 0 for row in group),
        }
        for key, group in groups.items()
    }


def _calls_text(rows: Iterable[Row]) -> str:
    counts: collections.Counter[int] = collections.Counter()
    for row in rows:
        counts[row.get("bytes") or 0] += row.get("count") or 0
    return ", ".join(f"{count} of {size}" for size, count in sorted(counts.items()))


def _tensors(before: list[Row], after: list[Row]) -> Iterator[Change]:
    def name(row: Row) -> str:
        return f"{row.get('path')} ({row.get('kind')})"

    for what, old, new in _paired(before, after, name):
        if old is None or new is None:
            yield Change("tensors", what, "", old and _tensor_text(old), new and _tensor_text(new))
        else:
            yield from _fields("tensors", what, _with_split(old), _with_split(new), _TENSOR_FIELDS)


def _with_split(row: Row) -> Row:
    return row | {"split": row.get("split") or "whole"}


def _tensor_text(row: Row) -> str:
    shape = ",".join(str(size) for size in row.get("shape") or ())
    return f"{row.get('dtype')}[{shape}] {row.get('split') or 'whole'}"


def _layers(before: list[Row], after: list[Row]) -> Iterator[Change]:
    def name(row: Row) -> str:
        return f"{row.get('layer') or 'no layer'} ({row.get('phase')})"

    small: list[tuple[Row, Row]] = []
    for what, old, new in _paired(before, after, name):
        if old is None or new is None:
            seconds = [row and row.get("seconds") for row in (old, new)]
            yield Change("layers", what, "", *seconds, "seconds")
            continue
        yield from _fields("layers", what, old, new, {"times": "count"})
        moved = {f: u for f, u in _LAYER_FIELDS.items() if _moved(old.get(f), new.get(f))}
        yield from _fields("layers", what, old, new, moved)
        if not moved and any(old.get(field) != new.get(field) for field in _LAYER_FIELDS):
            small.append((old, new))
    if small:
        sums = [sum(pair[side].get("seconds") or 0 for pair in small) for side in (0, 1)]
        what = f"{len(small)} more, each by at most {SMALLEST_TIME_CHANGE:.0%}"
        yield Change("layers", what, "seconds", *sums, "seconds")
    orders = [[name(row) for row in rows] for rows in (before, after)]
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        yield Change("layers", "order of execution", "", *(", ".join(order) for order in orders))


def _temporaries(before: list[Row], after: list[Row]) -> Iterator[Change]:
    """Not by name: the compiler numbers them anew in every program."""

    def name(row: Row) -> str:
        shape = ",".join(str(size) for size in row.get("shape") or ())
        return f"{row.get('dtype')}[{shape}] in {row.get('layer') or 'no layer'}"

    for what, old, new in _paired(before, after, name):
        if (old and old.get("bytes")) != (new and new.get("bytes")):
            sizes = [row and row.get("bytes") for row in (old, new)]
            yield Change("temporaries", what, "", *sizes, "bytes")


def _remedies(before: list[Row], after: list[Row]) -> Iterator[Change]:
    units = {"fits": "", "peak": "bytes", "seconds_per_step": "seconds"}
    for what, old, new in _paired(before, after, lambda row: str(row.get("change"))):
        if old is None or new is None:
            yield Change("remedies", what, "", *(row and _fit_text(row) for row in (old, new)))
        else:
            yield from _fields("remedies", what, old, new, units)


def _fit_text(row: Row) -> str:
    return "fits" if row.get("fits") else "does not fit"


def _notes(before: Sequence[str], after: Sequence[str]) -> Iterator[Change]:
    for what, old, new in _paired(before, after, str):
        if old is None or new is None:
            yield Change("notes", what, "", old, new)


def _others(before: Row, after: Row) -> Iterator[Change]:
    known = {*_SETTINGS, *_HEADLINES, *_ROWS, "parameters", "flops", "budget", "bytes_per_device"}
    known |= {"versions", "format"}
    rest = [{key: plan[key] for key in plan if key not in known} for plan in (before, after)]
    yield from _mapping("other", "", *rest)


def _paired(
    before: Sequence[Any], after: Sequence[Any], name: Callable[[Any], str]
) -> Iterator[tuple[str, Any, Any]]:
    """Rows of the same name, the second of a name with the second; None where there is none."""
    old, new = (_by_name(rows, name) for rows in (before, after))
    for key in dict.fromkeys((*old, *new)):
        what, occurrence = key
        told = what if occurrence == 1 else f"{what}, the {occurrence}. of that name"
        yield told, old.get(key), new.get(key)


def _by_name(rows: Sequence[Any], name: Callable[[Any], str]) -> dict[tuple[str, int], Any]:
    seen: collections.Counter[str] = collections.Counter()
    found = {}
    for row in rows:
        seen[name(row)] += 1
        found[name(row), seen[name(row)]] = row
    return found


def _moved(old: Any, new: Any) -> bool:
    if not (_is_number(old) and _is_number(new)):
        return old != new
    return not math.isclose(old, new, rel_tol=SMALLEST_TIME_CHANGE)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
