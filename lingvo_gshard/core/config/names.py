"""Refuses mistyped names, and suggests the valid name that is nearest."""

from __future__ import annotations

import bisect
import difflib
import os
import re
from collections.abc import Collection, Iterable
from typing import Any

from lingvo_gshard.core.errors import UserError

_LISTED, _LONGEST_LIST = 40, 600
_COMPARED = 5_000
_LISTED_PATHS = 8


def check(name: Any, valid: Collection[Any], problem: str) -> None:
    """Raises UserError, with the problem and the nearest valid name, unless a name is valid."""
    if name not in valid:
        raise UserError(f"{problem}. {nearest(name, valid)}")


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a sentence for an error message: the nearest valid name, or all valid names."""
    valid = sorted({str(v) for v in valid})
    # Comparing takes long. Among very many names, those with the same beginning are compared.
    place = max(bisect.bisect(valid, str(name)) - _COMPARED // 2, 0)
    near = valid if len(valid) <= _COMPARED else valid[place : place + _COMPARED]
    # A name such as fp16 means a name with the same number.
    number = re.sub(r"\D", "", str(name))
    same = [v for v in near if number and re.sub(r"\D", "", v) == number]
    matches = difflib.get_close_matches(str(name), same, n=1, cutoff=0.5)
    if matches := matches or difflib.get_close_matches(str(name), near, n=1):
        return f"Did you mean {matches[0]!r}?"
    if not valid:
        return "There are none."
    shown = valid if len(", ".join(valid)) <= _LONGEST_LIST else valid[:_LISTED]
    more = f" and {len(valid) - len(shown)} more" if len(valid) > len(shown) else ""
    return "Valid: " + ", ".join(shown) + more + "."


def nearest_file(path: str) -> str:
    """Returns a hint to the file in its folder that has the most similar name; "" if none has."""
    folder, name = os.path.split(path)
    files = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = () if name in files else difflib.get_close_matches(name, files, 1)
    return f". Did you mean {os.path.join(folder, near[0])!r}?" if near else ""


def any_of(paths: Iterable[str]) -> str:
    """Returns a sentence that suggests several paths, those with the fewest parts first."""
    paths = sorted(set(paths), key=lambda path: (path.count("."), path))
    if len(paths) == 1:
        return f"Did you mean {paths[0]!r}?"
    more = f" and {len(paths) - _LISTED_PATHS} more" if len(paths) > _LISTED_PATHS else ""
    return "Did you mean one of " + ", ".join(paths[:_LISTED_PATHS]) + more + "?"


def listed(given: str | Iterable[str]) -> tuple[str, ...]:
    """Returns a setting as a tuple: ("de",) for "de", ("de", "fr") for ["de", "fr"]."""
    return (given,) if isinstance(given, str) else tuple(given)
