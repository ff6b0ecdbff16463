"""Shares: which part of the training rows comes from each language and source, step by step."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import Configurable, Params, UserError, names
from lingvo_gshard.data import Group, mixture_plan


def temperature_probabilities(counts: Sequence[int], temperature: float) -> np.ndarray:
    """Returns the sampling probability of each language: p_l ~ n_l ** (1 / temperature).

    Source: Arivazhagan et al. 2019, section 4.2, https://arxiv.org/abs/1907.05019.

    Args:
      counts: number of sentences n_l of each language.
      temperature: 1 keeps the proportions of the data; infinity makes all languages equal.

    Raises:
      UserError: the temperature or a count is below 1.
    """
    if not temperature >= 1:
        raise UserError(f"temperature must be at least 1, not {temperature}")
    amounts = np.asarray(counts, np.float64)
    if amounts.size == 0 or amounts.min() < 1:
        raise UserError("Every language needs at least one sentence to be sampled from")
    # Computed through logarithms so that small exponents cannot overflow.
    weights = np.exp(np.log(amounts / amounts.max()) / temperature)
    return weights / weights.sum()


class Shares(Configurable):
    """Computes the share of each language and source in the training rows of a step.

    The shares follow `language_shares`, with a temperature that may change.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "temperature",
            1.0,
            "Languages are sampled as n ** (1 / temperature): 1 keeps the proportions of the data; "
            "the larger, the more alike the languages.",
            minimum=1,
        )
        p.define(
            "temperature_schedule",
            (),
            "Pairs (step, temperature) in place of `temperature`, the steps ascending, such as "
            "((0, 1.0), (10000, 5.0)). Between two steps the temperature changes linearly; before "
            "the first and after the last it stays.",
        )
        p.define(
            "language_weights",
            (),
            'Pairs (language, weight), such as (("de", 2.0),); 1 for all others. 0 leaves a '
            "language out.",
        )
        p.define(
            "source_weights", (), "Pairs (source, weight); 1 for all others. 0 leaves a source out."
        )
        p.define("most_rows", 0, "Most rows that a language counts for; 0: no limit.", minimum=0)
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        pairs = self.p.temperature_schedule or ((0, self.p.temperature),)
        self._temperatures = _schedule("temperature_schedule", pairs)
        self._weights = {
            kind: _weights(f"{kind}_weights", self.p.get(f"{kind}_weights"))
            for kind in ("language", "source")
        }

    def used(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups whose share is not 0.

        Raises:
          UserError: a weight is of a language or a source that is not there, or no group is left.
        """
        for kind, weights in self._weights.items():
            there = {getattr(group, kind) for group in groups}
            for name in weights:
                names.check(
                    name, there, f"{kind}_weights: the prepared data has no {kind} {name!r}"
                )
        left = [group for group in groups if all(self._weight(group))]
        if not left:
            raise UserError("language_weights and source_weights leave out all rows")
        return left

    def at(self, step: float, groups: Sequence[Group]) -> np.ndarray:
        """Returns the share of each group at a step; the shares have a sum of 1."""
        weights = np.array([self._weight(group) for group in groups])
        temperature = _value_at(self._temperatures, step)
        return mixture_plan.language_shares(
            groups, temperature, weights, self.p.most_rows or math.inf
        )

    def by_block(
        self, groups: Sequence[Group], steps_of: Callable[[np.ndarray], float]
    ) -> list[np.ndarray]:
        """Returns the shares of each block until they stay as they are.

        Args:
          steps_of: estimates the steps that train on a block, from the shares of the groups.
        """
        step, found = 0.0, [self.at(0.0, groups)]
        while step < self._temperatures[-1][0]:
            step += steps_of(found[-1])
            found.append(self.at(step, groups))
        return found

    def _weight(self, group: Group) -> tuple[float, float]:
        """Returns the weights of a group's language and of its source."""
        of_language, of_source = self._weights["language"], self._weights["source"]
        return of_language.get(group.language, 1.0), of_source.get(group.source, 1.0)


def _schedule(name: str, pairs: object) -> list[tuple[float, float]]:
    """Returns the steps and values of a hyperparameter; ValueError if it is no schedule."""
    found = [(float(step), float(value)) for step, value in _pairs(name, pairs)]
    if not found or any(b <= a for (a, _), (b, _) in itertools.pairwise(found)):
        raise UserError(
            f"{name} is {pairs!r}; pairs (step, temperature) with ascending steps were expected"
        )
    if low := [value for _, value in found if not value >= 1]:
        raise UserError(f"{name} is {pairs!r}; {low[0]} is below 1")
    return found


def _value_at(schedule: Sequence[tuple[float, float]], step: float) -> float:
    after = bisect.bisect_right(schedule, step, key=lambda pair: pair[0])
    if after in (0, len(schedule)):
        return schedule[min(after, len(schedule) - 1)][1]
    (begin, first), (end, last) = schedule[after - 1 : after + 1]
    share = (step - begin) / (end - begin)
    return (1 - share) * first + share * last


def _weights(name: str, pairs: object) -> Mapping[str, float]:
    found = {str(key): float(value) for key, value in _pairs(name, pairs)}
    for key, value in found.items():
        if not 0 <= value < math.inf:
            raise UserError(f"{name} is {pairs!r}; the weight of {key!r} must be 0 or more")
    return found


def _pairs(name: str, pairs: Any) -> list[tuple[Any, float]]:
    """Returns the value of a hyperparameter as a list of pairs; ValueError if it is none."""
    try:
        return [(key, float(value)) for key, value in pairs]
    except (TypeError, ValueError):
        raise UserError(f"{name} is {pairs!r}; a tuple of pairs was expected") from None


@dataclasses.dataclass(frozen=True)
class Use:
    """Counts how often training has read the rows of a language, repeats included."""

    language: str
    rows: int
    read: int

    @property
    def epochs(self) -> float:
        """The number of times that each row was read, on average."""
        return self.read / self.rows


def uses(planner: mixture_plan.Planner, block: int, batch: int) -> list[Use]:
    """Returns how often the rows of each language are in the batches before a position.

    Rows of earlier chapters count if they were drawn, also if they fit no batch.
    """
    first, groups = block - block % mixture_plan.BLOCKS_OF_CHAPTER, planner.mixture.groups
    counts = planner.mixture.drawn(first)
    begins = np.array([group.begin for group in groups])
    for number, batches in zip(range(first, block + 1), planner.blocks(first), strict=False):
        for planned in batches[: batch if number == block else None]:
            rows = planned.pieces.rows[planned.pieces.begins == 0]
            of_group = np.searchsorted(begins, rows, side="right") - 1
            counts = counts + np.bincount(of_group, minlength=len(begins))
    read: collections.Counter[str] = collections.Counter()
    there: collections.Counter[str] = collections.Counter()
    for group, count in zip(groups, counts.tolist(), strict=True):
        read[group.language] += count
        there[group.language] += group.rows
    return [Use(language, there[language], read[language]) for language in sorted(read)]
