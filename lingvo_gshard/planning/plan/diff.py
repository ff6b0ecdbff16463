"""Compares two plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import msgspec

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.machines import compilers
from lingvo_gshard.planning.plan import row_changes
from lingvo_gshard.planning.plan.change import (
    Change,
    changed_fields,
    changed_items,
    is_number,
)
from lingvo_gshard.planning.plan.plan import Plan

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
) -> list[Change]:
    """Returns the differences between two plans, ordered by section.

    Args:
      before: the first plan.
      after: the second plan.
      allow_other_versions: compares plans made by different versions of the compiler.
      names: names of the plans for error messages, such as their files.

    Raises:
      UserError: if the plans were made by different versions of the compiler or of this library.
    """
    if not allow_other_versions:
        _check_versions(before.versions, after.versions, names)
    return [
        *changed_fields("setting", "", before, after, dict.fromkeys(_SETTINGS, "")),
        *changed_fields("headline", "", before, after, _HEADLINES),
        *_groups(before, after),
        *changed_items(
            "memory", "", _items(before.bytes_per_device), _items(after.bytes_per_device), "bytes"
        ),
        *row_changes.collectives(before.collectives, after.collectives),
        *row_changes.tensors(before.tensors, after.tensors),
        *row_changes.layers(before.layers, after.layers),
        *row_changes.temporaries(before.largest_temporaries, after.largest_temporaries),
        *row_changes.remedies(before.remedies, after.remedies),
        *changed_items("versions", "", before.versions, after.versions),
        *row_changes.notes(before.notes, after.notes),
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
            "same versions, or pass --allow_other_versions"
        )


def _groups(before: Plan, after: Plan) -> Iterator[Change]:
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


def _items(record: object) -> Mapping[str, object]:
    """Returns the fields of a struct or dataclass by name; none for None."""
    if record is None:
        return {}
    if isinstance(record, msgspec.Struct):
        return msgspec.structs.asdict(record)
    return dataclasses.asdict(record)
