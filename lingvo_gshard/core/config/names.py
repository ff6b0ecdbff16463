"""Suggests the valid name that is nearest to a mistyped one."""

import difflib
from collections.abc import Iterable

_LISTED = 40


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a sentence for an error message: the nearest valid name, or all valid names."""
    valid = sorted({str(v) for v in valid})
    matches = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    if matches:
        return f"Did you mean {matches[0]!r}?"
    if not valid:
        return "There are none."
    more = f" and {len(valid) - _LISTED} more" if len(valid) > _LISTED else ""
    return "Valid: " + ", ".join(valid[:_LISTED]) + more + "."
