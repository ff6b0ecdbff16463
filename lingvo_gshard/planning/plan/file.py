"""A plan as a file: what is read must be a plan, whole and of this format."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

FORMAT = 1

MEMORY_CLASSES = ("weights", "moments", "activations", "inputs", "program")

# What every report reads, with the type it must have.
_FIELDS = {
    "name": str,
    "topology": str,
    "devices": int,
    "mesh": str,
    "fits": bool,
    "bytes_per_device": dict,
    "parameters": dict,
    "tensors": list,
    "largest_temporaries": list,
    "collectives": list,
    "flops": dict,
    "layers": list,
    "versions": dict,
}
_TYPE_NAMES = {str: "text", int: "a whole number", bool: "true or false"}
_TYPE_NAMES |= {dict: "an object", list: "a list"}


def load(path: str | pathlib.Path) -> dict[str, Any]:
    """Returns the plan that `gshard-plan --json` wrote.

    Raises ValueError naming the file and the reason if it is missing, is not JSON, is no plan, is
    of another format, or holds a number that is not finite.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no plan: not text in UTF-8") from error
    try:
        plan = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: no plan: not JSON ({error.msg}); expected a file that "
            "gshard-plan --json wrote"
        ) from error
    check(plan, str(path))
    return plan


def check(plan: Any, source: str) -> None:
    """Raises ValueError naming `source` and the reason unless `plan` is a plan of this format."""
    if not isinstance(plan, dict) or "format" not in plan:
        raise ValueError(f"{source}: no plan: expected an object with a field 'format'")
    if plan["format"] != FORMAT:
        raise ValueError(
            f"{source}: a plan of format {plan['format']!r}, and this version reads format "
            f"{FORMAT}: plan again with it"
        )
    for field, expected in _FIELDS.items():
        if field not in plan:
            raise ValueError(f"{source}: no plan: field {field!r} is missing")
        value = plan[field]
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            raise ValueError(
                f"{source}: no plan: {field!r} is {value!r:.60}; expected {_TYPE_NAMES[expected]}"
            )
    for field in ("tensors", "largest_temporaries", "collectives", "layers"):
        for index, row in enumerate(plan[field]):
            if not isinstance(row, dict):
                raise ValueError(f"{source}: no plan: {field}[{index}] is no object")
    for name in (*MEMORY_CLASSES, "peak", "capacity"):
        if not _is_number(plan["bytes_per_device"].get(name)):
            raise ValueError(f"{source}: no plan: 'bytes_per_device' has no number {name!r}")
    for where, value in _leaves(plan, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{source}: no plan: {where} is {value}, which is no finite number")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{where}[{index}]")
    else:
        yield where, value
