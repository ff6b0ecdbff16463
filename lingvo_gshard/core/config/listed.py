"""Settings that may be given as one string or as several, such as `input.languages`."""

from __future__ import annotations

from collections.abc import Iterable


def listed(given: str | Iterable[str]) -> tuple[str, ...]:
    """Returns a setting as a tuple: ("de",) for "de", ("de", "fr") for ["de", "fr"]."""
    return (given,) if isinstance(given, str) else tuple(given)
