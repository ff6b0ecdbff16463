"""Says which valid name a mistyped one was probably meant to be."""

import difflib
from collections.abc import Iterable

_LISTED = 40


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a sentence for an error message: the nearest valid name, or the valid ones."""
    valid = sorted({str(v) for v in valid})
    matches = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    if matches:
        return f"Did you mean {matches[0]!r}?"
    if not valid:
        return "There are none."
    more = f" and {len(valid) - _LISTED} more" if len(valid) > _LISTED else ""
    return "Valid: " + ", ".join(valid[:_LISTED]) + more + "."
