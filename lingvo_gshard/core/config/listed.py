"""Settings that are one text or several."""

from __future__ import annotations

from collections.abc import Iterable


def listed(given: str | Iterable[str]) -> tuple[str, ...]:
    """Returns the texts of a setting that is one text or several."""
    return (given,) if isinstance(given, str) else tuple(given)
