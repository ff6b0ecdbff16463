"""Finds the largest setting whose planned memory fits, in few compilations."""

from __future__ import annotations

from collections.abc import Callable


def largest(bytes_of: Callable[[int], int], capacity: int, first: int, compilations: int) -> int:
    """Returns the largest positive integer whose bytes are within a capacity.

    Bytes grow with the integer, almost linearly: layers and rows take the same memory each. So the
    next integer to try is the one where the line through two known points reaches the capacity.

    Args:
      bytes_of: returns the bytes for an integer. Each call takes a compilation.
      capacity: the most bytes.
      first: the first integer to try.
      compilations: most calls of `bytes_of`. The result then is the largest one known to fit.

    Returns:
      0 if not even 1 fits.
    """
    known = {first: bytes_of(first)}
    while len(known) < compilations:
        fits = max((n for n, size in known.items() if size <= capacity), default=0)
        too_large = min((n for n, size in known.items() if size > capacity), default=None)
        if too_large == fits + 1:
            break
        guess = _where_line_reaches(known, capacity, first)
        guess = max(guess, fits + 1)
        if too_large is not None:
            guess = min(guess, too_large - 1)
        known[guess] = bytes_of(guess)
    return max((n for n, size in known.items() if size <= capacity), default=0)


def _where_line_reaches(known: dict[int, int], capacity: int, first: int) -> int:
    """Returns where the line through the two points next to the capacity reaches it."""
    if len(known) == 1:
        # A line takes a second point.
        return first * 2 if known[first] <= capacity else max(1, first // 2)
    (low, low_bytes), (high, high_bytes) = sorted(
        sorted(known.items(), key=lambda point: abs(point[1] - capacity))[:2]
    )
    if high_bytes <= low_bytes:
        return 2 * high
    return int(low + (capacity - low_bytes) * (high - low) / (high_bytes - low_bytes))
