"""Shares: which part of the training rows comes from each language and source, step by step."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.prepared.table import Group


class Shares(Configurable):
    """Computes the share of each language and source in the training rows of a step.

    A language of n rows has a share in proportion to weight * min(n, most_rows) ** (1 / T), where
    T is the temperature (Arivazhagan et al. 2019, section 4.2, https://arxiv.org/abs/1907.05019).
    The sources of a language share its part in proportion to weight * rows.
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
        p.define(
            "most_rows",
            0,
            "Largest number of rows that a language counts for; 0: no limit.",
            minimum=0,
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        pairs = self.p.temperature_schedule or ((0, self.p.temperature),)
        self._temperature = _Piecewise.of("temperature_schedule", pairs)
        self._weights = {
            kind: _weights(f"{kind}_weights", self.p.get(f"{kind}_weights"))
            for kind in ("language", "source")
        }

    @property
    def last_change(self) -> float:
        """The step after which shares stay as they are."""
        return self._temperature.steps[-1]

    def used(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups whose share is not 0.

        Raises:
          UserError: a weight is of a language or a source that is not there, or no group is left.
        """
        for kind, weights in self._weights.items():
            there = {getattr(group, kind) for group in groups}
            for name in weights:
                if name not in there:
                    raise UserError(
                        f"{kind}_weights: the prepared data has no {kind} {name!r}. "
                        f"{names.nearest(name, there)}"
                    )
        left = [group for group in groups if all(self._weight(group))]
        if not left:
            raise UserError("language_weights and source_weights leave out all rows")
        return left

    def at(self, step: float, groups: Sequence[Group]) -> np.ndarray:
        """Returns the share of each group at a step; the shares have a sum of 1.

        Args:
          step: number of the step.
          groups: those of `used`.
        """
        rows = np.array([group.rows for group in groups], np.float64)
        weights = np.array([self._weight(group) for group in groups])
        _, language = np.unique([group.language for group in groups], return_inverse=True)
        of_language = np.bincount(language, rows)
        counted = np.minimum(of_language, self.p.most_rows or math.inf)
        weight_of_language = np.zeros(len(counted))
        weight_of_language[language] = weights[:, 0]
        # Through logarithms, so that no temperature overflows.
        logs = np.log(weight_of_language) + np.log(counted) / self._temperature.at(step)
        parts = np.exp(logs - logs.max())
        within = weights[:, 1] * rows
        shares = parts[language] / parts.sum() * within / np.bincount(language, within)[language]
        return shares

    def _weight(self, group: Group) -> tuple[float, float]:
        """Returns the weights of a group's language and of its source."""
        of_language, of_source = self._weights["language"], self._weights["source"]
        return of_language.get(group.language, 1.0), of_source.get(group.source, 1.0)


@dataclasses.dataclass(frozen=True)
class _Piecewise:
    """A value that changes linearly between given steps."""

    steps: list[float]
    values: list[float]

    @classmethod
    def of(cls, name: str, pairs: object) -> _Piecewise:
        """Returns the schedule of a hyperparameter; ValueError if it is none."""
        found = [(float(step), float(value)) for step, value in _pairs(name, pairs)]
        steps = [step for step, _ in found]
        if not found or any(b <= a for a, b in zip(steps, steps[1:], strict=False)):
            raise UserError(
                f"{name} is {pairs!r}; pairs (step, temperature) with ascending steps were expected"
            )
        if low := [value for _, value in found if not value >= 1]:
            raise UserError(f"{name} is {pairs!r}; {low[0]} is below 1")
        return cls(steps, [value for _, value in found])

    def at(self, step: float) -> float:
        """Returns the value at a step."""
        after = bisect.bisect_right(self.steps, step)
        if after in (0, len(self.steps)):
            return self.values[min(after, len(self.steps) - 1)]
        begin, end = self.steps[after - 1 : after + 1]
        share = (step - begin) / (end - begin)
        return (1 - share) * self.values[after - 1] + share * self.values[after]


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
