"""Change: one difference between two plans, and how rows of two plans are paired."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# Changes of a layer's or a collective's time below this fraction are not listed one by one.
SMALLEST_TIME_CHANGE = 0.01


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference between two plans.

    Attributes:
      section: one of `diff.SECTIONS`.
      what: the number, tensor, layer or collective that differs.
      field: which field of it differs; empty if it is a single value or was added or removed.
      before: value in the first plan; None if it is missing there.
      after: value in the second plan; None if it is missing there.
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
) -> Iterator[Change]:
    """Yields the attributes in `units` that differ between two objects.

    If `what` is empty, each attribute is listed as a separate item.
    """
    for field, unit in units.items():
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            yield Change(section, what or field, field if what else "", old, new, unit)


def changed_items(
    section: str, prefix: str, before: Mapping, after: Mapping, unit: str = ""
) -> Iterator[Change]:
    """Yields the keys that only one of two mappings has or whose values differ."""
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            yield Change(section, prefix + key, "", before.get(key), after.get(key), unit)


def paired(
    before: Sequence[Any], after: Sequence[Any], name: Callable[[Any], str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, row before, row after) for rows of the same name; None for a missing row.

    If a name occurs several times, the rows are paired in order.
    """
    old, new = (_by_name(rows, name) for rows in (before, after))
    for key in dict.fromkeys((*old, *new)):
        what, occurrence = key
        title = what if occurrence == 1 else f"{what} (#{occurrence} of this name)"
        yield title, old.get(key), new.get(key)


def has_moved(old: Any, new: Any) -> bool:
    """Returns whether two values differ; numbers must differ by `SMALLEST_TIME_CHANGE`."""
    if not (is_number(old) and is_number(new)):
        return old != new
    return not math.isclose(old, new, rel_tol=SMALLEST_TIME_CHANGE)


def is_number(value: Any) -> bool:
    """Returns whether a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _by_name(rows: Sequence[Any], name: Callable[[Any], str]) -> dict[tuple[str, int], Any]:
    counts: collections.Counter[str] = collections.Counter()
    found = {}
    for row in rows:
        counts[name(row)] += 1
        found[name(row), counts[name(row)]] = row
    return found
