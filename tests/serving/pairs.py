"""Requests that together have every pair of two options' values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ABSENT = object()
# Bodies drawn for each that is kept, and draws without a new pair after which all are found.
_DRAWS, _PATIENCE = 40, 3_000


def all_pairs(
    options: Mapping[str, Sequence[Any]], is_possible: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Returns bodies that have each possible pair of values at least once.

    Args:
      options: name of each option -> its values; ABSENT leaves the option out.
      is_possible: whether the server takes a body.
    """
    chance, seen, found, in_vain = random.Random(1), set(), [], 0

    def draw() -> tuple[set, dict[str, Any]]:
        while True:
            picks = [chance.randrange(len(values)) for values in options.values()]
            values = {name: options[name][pick] for name, pick in zip(options, picks, strict=True)}
            body = {name: value for name, value in values.items() if value is not ABSENT}
            if is_possible(body):
                return set(itertools.combinations(enumerate(picks), 2)) - seen, body

    while in_vain < _PATIENCE:
        new, body = max((draw() for _ in range(_DRAWS)), key=lambda drawn: len(drawn[0]))
        if not new:
            in_vain += _DRAWS
            continue
        in_vain = 0
        seen |= new
        found.append(body)
    return found
