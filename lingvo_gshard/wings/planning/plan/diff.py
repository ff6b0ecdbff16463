"""Compares two plans, in totals and row by row, and limits how much worse one may be."""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lingvo_gshard.core import UserError, names
from lingvo_gshard.wings.hlo.collectives import KINDS
from lingvo_gshard.wings.planning.machines import compilers
from lingvo_gshard.wings.planning.plan.plan import (
    ACROSS_SLICES,
    CollectiveRow,
    LayerRow,
    Plan,
    TemporaryRow,
    TensorRow,
)

# Changes of a layer's or a collective's time below this fraction are not listed one by one.
SMALLEST_TIME_CHANGE = 0.01


@dataclasses.dataclass(frozen=True)
class PlanDifference:
    """One difference between two plans.

    Attributes:
      section: one of `SECTIONS`.
      what: the number, tensor, layer or collective that differs.
      field: the field of a row that differs; empty for a single value, and for an added or removed
        row.
      before, after: the values; None in a plan that has none.
      unit: "bytes", "seconds", "flops", "count", "number", "rate" or "share"; empty for text.
    """

    section: str
    what: str
    field: str
    before: Any
    after: Any
    unit: str = ""

    @property
    def ratio(self) -> float | None:
        """Returns after / before; None unless both are numbers and `before` is not 0."""
        if is_number(self.before) and is_number(self.after) and self.before:
            return self.after / self.before
        return None


def changed_fields(
    section: str, what: str, before: Any, after: Any, units: Mapping[str, str]
) -> Iterator[PlanDifference]:
    """Yields the attributes in `units` that differ between two objects.

    If `what` is empty, each attribute is listed as a separate item.
    """
    for field, unit in units.items():
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            yield PlanDifference(section, what or field, field if what else "", old, new, unit)


def changed_items(
    section: str, prefix: str, before: Mapping, after: Mapping, unit: str = ""
) -> Iterator[PlanDifference]:
    """Yields the keys that only one of two mappings has or whose values differ."""
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            yield PlanDifference(section, prefix + key, "", before.get(key), after.get(key), unit)


def titled(rows: Iterable[Any], name: Callable[[Any], str]) -> dict[str, Any]:
    """Returns rows by name. Of several rows with one name, later ones have numbers in their key."""
    counts: collections.Counter[str] = collections.Counter()
    found = {}
    for row in rows:
        what = name(row)
        counts[what] += 1
        number = f" (#{counts[what]} of this name)" if counts[what] > 1 else ""
        found[what + number] = row
    return found


def changed_rows(
    section: str,
    rows: Iterable[Mapping[str, Any]],
    text: Callable[[Any], Any],
    units: Callable[[Any, Any], Mapping[str, str]],
    unit: str = "",
) -> Iterator[PlanDifference]:
    """Yields the rows that only one of two mappings has, and the changed fields of the others.

    Args:
      text: returns the value that stands for an added or removed row.
      units: returns the fields of two rows to compare, with their units.
    """
    before, after = rows
    for what in dict.fromkeys((*before, *after)):
        old, new = before.get(what), after.get(what)
        if old is None or new is None:
            yield PlanDifference(section, what, "", old and text(old), new and text(new), unit)
        else:
            yield from changed_fields(section, what, old, new, units(old, new))


def moved_fields(old: Any, new: Any, units: Mapping[str, str]) -> dict[str, str]:
    """Returns the fields in `units` that differ; numbers must differ by `SMALLEST_TIME_CHANGE`."""
    return {
        field: unit
        for field, unit in units.items()
        if not _is_close(getattr(old, field), getattr(new, field))
    }


def _is_close(old: Any, new: Any) -> bool:
    if is_number(old) and is_number(new):
        return math.isclose(old, new, rel_tol=SMALLEST_TIME_CHANGE)
    return old == new


def is_number(value: Any) -> bool:
    """Returns whether a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TENSOR_FIELDS = {
    "layer": "", "layout": "", "shape": "", "dtype": "", "split": "", "bytes": "bytes",
    "bytes_per_device": "bytes",
}  # fmt: skip
_LAYER_FIELDS = {
    "flops": "flops", "bytes": "bytes", "seconds_bound": "seconds", "seconds": "seconds",
    "compute_seconds": "seconds", "memory_seconds": "seconds", "communication_seconds": "seconds",
}  # fmt: skip
_REMEDY_FIELDS = {"fits": "", "peak": "bytes", "seconds_per_step": "seconds"}
_COLLECTIVE_FIELDS = {"dtype": "", "count": "count", "bytes": "bytes"}
_TIMES: dict[str, str] = dict.fromkeys(("seconds_bound", "seconds", "hidden_seconds"), "seconds")


@dataclasses.dataclass(frozen=True)
class _CollectiveTotals:
    """Sums over the calls of one kind of collective; `calls` says the number of each size."""

    dtype: str
    count: int
    bytes: int
    calls: str
    seconds_bound: float
    seconds: float
    hidden_seconds: float

    def __str__(self) -> str:
        calls = "1 call" if self.count == 1 else f"{self.count:,} calls"
        return f"{calls}, {self.bytes:,} bytes in total, {self.dtype}"


def _collective_units(old: _CollectiveTotals, new: _CollectiveTotals) -> dict[str, str]:
    """Returns the fields to compare: the calls of each size only if the totals are equal."""
    is_equal = all(getattr(old, field) == getattr(new, field) for field in _COLLECTIVE_FIELDS)
    return ({"calls": ""} if is_equal else _COLLECTIVE_FIELDS) | moved_fields(old, new, _TIMES)


def _layers(before: Sequence[LayerRow], after: Sequence[LayerRow]) -> Iterator[PlanDifference]:
    """Yields changed layers; those whose time barely changes are added up."""
    rows = [titled(each, _layer_name) for each in (before, after)]
    yield from changed_rows("layers", rows, lambda row: row.seconds, _layer_units, "seconds")
    pairs = [(row, rows[1][what]) for what, row in rows[0].items() if what in rows[1]]
    small = [pair for pair in pairs if _barely_changes(*pair)]
    if small:
        old, new = (sum(row.seconds for row in each) for each in zip(*small, strict=True))
        what = f"{len(small)} more, each by at most {SMALLEST_TIME_CHANGE:.0%}"
        yield PlanDifference("layers", what, "seconds", old, new, "seconds")
    orders = [[_layer_name(row) for row in each] for each in (before, after)]
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        numbered = enumerate(zip(*orders, strict=True), 1)
        position, first = next((n, pair) for n, pair in numbered if pair[0] != pair[1])
        what = f"order of execution, first changed at {position}"
        yield PlanDifference("layers", what, "", *first)


def _layer_units(old: LayerRow, new: LayerRow) -> dict[str, str]:
    return {"times": "count"} | moved_fields(old, new, _LAYER_FIELDS)


def _barely_changes(old: LayerRow, new: LayerRow) -> bool:
    is_equal = all(getattr(old, field) == getattr(new, field) for field in _LAYER_FIELDS)
    return not is_equal and not moved_fields(old, new, _LAYER_FIELDS)


def _row_changes(before: Plan, after: Plan) -> Iterator[PlanDifference]:
    """Yields the differences in collectives, tensors, layers, temporaries and remedies."""
    plans = before, after
    collectives = [_collective_totals(plan.collectives) for plan in plans]
    yield from changed_rows("collectives", collectives, str, _collective_units)
    yield from changed_rows(
        "tensors",
        [titled(plan.tensors, lambda row: f"{row.path} ({row.kind})") for plan in plans],
        lambda row: f"{_shape_text(row)} {row.split}",
        lambda old, new: _TENSOR_FIELDS,
    )
    yield from _layers(before.layers, after.layers)
    # Names do not pair temporaries: the compiler numbers the instructions of each program itself.
    old, new = (_temporaries(plan.largest_temporaries) for plan in plans)
    yield from changed_items("temporaries", "", old, new, "bytes")
    yield from changed_rows(
        "remedies",
        [titled(plan.remedies, lambda row: row.change) for plan in plans],
        lambda row: "fits" if row.fits else "does not fit",
        lambda old, new: _REMEDY_FIELDS,
    )


def _collective_totals(rows: Iterable[CollectiveRow]) -> dict[str, _CollectiveTotals]:
    """Returns the sums over calls of one kind, axis, layer and phase, by these in words."""
    groups: dict[str, list[CollectiveRow]] = collections.defaultdict(list)
    for row in rows:
        what = f"{row.kind} over {row.axis} in {row.layer or 'no layer'} ({row.phase})"
        groups[what].append(row)
    return {
        what: _CollectiveTotals(
            dtype=", ".join(sorted({row.dtype for row in group})),
            count=sum(row.count for row in group),
            bytes=sum(row.count * row.bytes for row in group),
            calls=_calls_text(group),
            **{name: sum(getattr(row, name) for row in group) for name in _TIMES},
        )
        for what, group in groups.items()
    }


def _calls_text(rows: Iterable[CollectiveRow]) -> str:
    counts: collections.Counter[int] = collections.Counter()
    for row in rows:
        counts[row.bytes] += row.count
    return ", ".join(f"{count} of {size}" for size, count in sorted(counts.items()))


def _temporaries(rows: Iterable[TemporaryRow]) -> dict[str, int]:
    found = titled(rows, lambda row: f"{_shape_text(row)} in {row.layer or 'no layer'}")
    return {what: row.bytes for what, row in found.items()}


def _shape_text(row: TensorRow | TemporaryRow) -> str:
    return f"{row.dtype}[{','.join(map(str, row.shape))}]"


def _layer_name(row: LayerRow) -> str:
    return f"{row.layer or 'no layer'} ({row.phase})"


SECTIONS = (
    "setting", "headline", "memory", "collectives", "tensors", "layers", "temporaries", "remedies",
    "versions", "notes",
)  # fmt: skip

# Packages that determine the compiled program.
_COMPILER = ("lingvo_gshard", "jax", "jaxlib", *compilers.PACKAGES.values())
_SETTINGS = (
    "name", "topology", "chip", "devices", "compiler", "mesh", "strategy_name", "strategy",
    "partitioner",
)  # fmt: skip
_HEADLINES = {
    "fits": "", "seconds_per_step": "seconds", "seconds_per_step_bound": "seconds",
    "steps_per_second": "rate", "steps_per_second_bound": "rate", "tokens_per_step": "count",
    "tokens_per_second": "rate", "mfu": "share", "compile_seconds": "seconds",
}  # fmt: skip


def diff(
    before: Plan,
    after: Plan,
    *,
    allow_other_versions: bool = False,
    names: tuple[str, str] = ("the first plan", "the second plan"),
) -> list[PlanDifference]:
    """Returns the differences between two plans, ordered by section.

    Args:
      allow_other_versions: compares plans made by different versions of the compiler.

    Raises:
      UserError: if the plans were made by different versions of the compiler or of this library.
    """
    if not allow_other_versions:
        _check_versions(before.versions, after.versions, names)
    memory = [_items(plan.bytes_per_device) for plan in (before, after)]
    return [
        *changed_fields("setting", "", before, after, dict.fromkeys(_SETTINGS, "")),
        *changed_fields("headline", "", before, after, _HEADLINES),
        *_groups(before, after),
        *changed_items("memory", "", *memory, unit="bytes"),
        *_row_changes(before, after),
        *changed_items("versions", "", before.versions, after.versions),
        *changed_items("notes", "", titled(before.notes, str), titled(after.notes, str)),
    ]


def _check_versions(
    before: Mapping[str, str], after: Mapping[str, str], names: tuple[str, str]
) -> None:
    differing = [
        f"{package} {before.get(package) or 'none'} and {after.get(package) or 'none'}"
        for package in _COMPILER
        if before.get(package) != after.get(package)
    ]
    if differing:
        raise UserError(
            f"{names[0]} and {names[1]} were made by different versions: {'; '.join(differing)}. "
            "Different compilers make different programs from the same step: plan again with the "
            "same versions, or pass `allow_other_versions`"
        )


def _groups(before: Plan, after: Plan) -> Iterator[PlanDifference]:
    for group, unit in (("parameters", "count"), ("flops", "flops"), ("budget", "number")):
        old, new = (_items(getattr(plan, group)) for plan in (before, after))
        yield from changed_items("headline", f"{group}.", old, new, unit)
    for group in ("goodput", "loads"):
        old, new = (_numbers(getattr(plan, group)) for plan in (before, after))
        yield from changed_items("headline", f"{group}.", old, new, "number")


def _numbers(record: object) -> Mapping[str, object]:
    """Returns the numbers of a record by name, and of its ranges the mean; none for None."""
    found = {}
    for name, value in _items(record).items():
        value = value.get("mean") if isinstance(value, dict) else value
        if is_number(value):
            found[name] = value
    return found


def _items(record: Any) -> Mapping[str, object]:
    """Returns the fields of a struct or dataclass by name; none for None."""
    if isinstance(record, msgspec.Struct):
        return msgspec.structs.asdict(record)
    return {} if record is None else dataclasses.asdict(record)


EXAMPLE = "peak>+2%,step>+3%,all-gather>0"

# Names of quantities -> their values in a plan, and their unit as in `PlanDifference.unit`.
_QUANTITIES: Mapping[str, tuple[Callable[[Plan], float | None], str]] = {
    "peak": (lambda plan: plan.bytes_per_device.peak, "bytes"),
    "weights": (lambda plan: plan.bytes_per_device.weights, "bytes"),
    "moments": (lambda plan: plan.bytes_per_device.moments, "bytes"),
    "activations": (lambda plan: plan.bytes_per_device.activations, "bytes"),
    "step": (lambda plan: plan.seconds_per_step, "seconds"),
    "bound": (lambda plan: plan.seconds_per_step_bound, "seconds"),
    "tokens_per_second": (lambda plan: plan.tokens_per_second, "rate"),
    "mfu": (lambda plan: plan.mfu, "share"),
    "flops": (lambda plan: plan.flops.executed, "flops"),
    "parameters": (lambda plan: plan.parameters.total if plan.parameters else None, "count"),
    "collectives": (lambda plan: sum(row.count for row in plan.collectives), "count"),
    "across-slices": (lambda plan: _calls(plan, lambda row: row.endswith(ACROSS_SLICES)), "count"),
    **{
        kind: (lambda plan, kind=kind: _calls(plan, lambda row: _within(row) == kind), "count")
        for kind in KINDS
    },
}
_COMPARISONS = {">": operator.gt, "<": operator.lt}
_LIMIT = re.compile(r"(?P<name>[\w-]+)\s*(?P<sign>[<>])\s*(?P<amount>[+-]?[\d.]+)\s*(?P<unit>\S*)")
_SCALES = {"": 1.0, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit on the change of one quantity.

    Attributes:
      text: the limit as it was given, such as "peak>+2%".
      sign: ">" if larger changes exceed the limit, "<" if smaller changes do.
      amount: the change, in the quantity's unit or as a share of the value before.
    """

    text: str
    name: str
    sign: str
    amount: float
    is_share: bool

    def check(self, before: Plan, after: Plan) -> Checked:
        """Returns the quantity in both plans, and whether its change exceeds the limit."""
        value, unit = _QUANTITIES[self.name]
        old, new = value(before), value(after)
        if old is None or new is None:
            return Checked(self, old, new, unit, is_exceeded=(old is None) != (new is None))
        allowed = abs(old) * self.amount if self.is_share else self.amount
        return Checked(self, old, new, unit, _COMPARISONS[self.sign](new - old, allowed))


@dataclasses.dataclass(frozen=True)
class Checked:
    """A limit that was applied to two plans. The value is None if a plan has no such quantity.

    A value that only one plan has exceeds every limit.
    """

    limit: Limit
    before: float | None
    after: float | None
    unit: str
    is_exceeded: bool


def parse(text: str, where: str = "`fail_on`") -> list[Limit]:
    """Returns the limits that a text such as "peak>+2%,all-gather>0" lists.

    Each is a quantity, ">" or "<", and the change that exceeds the limit: a number, with a
    unit of bytes or with "%" for a share of the value before.

    Raises:
      UserError: a limit cannot be read, or its quantity is unknown.
    """
    return [_parse_one(part.strip(), where) for part in text.split(",") if part.strip()]


def _parse_one(part: str, where: str) -> Limit:
    found = _LIMIT.fullmatch(part)
    if not found:
        raise UserError(f"{where}: {part!r} is no limit; expected such as {EXAMPLE}")
    name, sign, amount, unit = found.group("name", "sign", "amount", "unit")
    names.check(name, _QUANTITIES, f"{where}: unknown quantity {name!r}")
    of_bytes = _QUANTITIES[name][1] == "bytes"
    if unit != "%" and (unit not in _SCALES or (unit and not of_bytes)):
        units = ", ".join(filter(None, _SCALES)) + " or %" if of_bytes else "none or %"
        raise UserError(f"{where}: {part!r}: unknown unit {unit!r} of {name}; expected {units}")
    try:
        number = float(amount)
    except ValueError:
        raise UserError(f"{where}: {part!r}: {amount} is no number") from None
    scale = 0.01 if unit == "%" else _SCALES[unit]
    return Limit(part, name, sign, number * scale, unit == "%")


def _calls(plan: Plan, counts: Callable[[str], bool]) -> int:
    """Returns the calls in a step of the collectives whose kind counts."""
    return sum(row.count for row in plan.collectives if counts(row.kind))


def _within(kind: str) -> str:
    return kind.removesuffix(ACROSS_SLICES)
