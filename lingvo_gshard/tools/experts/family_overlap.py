"""Overlap of experts between the languages of a family, and between those of different families."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping

import msgspec
import numpy as np

from lingvo_gshard.tools.experts.families import family


class FamilyOverlap(msgspec.Struct, frozen=True):
    """Mean overlaps of the expert use of pairs of languages, in one layer.

    The overlap of two languages is the share of their choices that go to the same experts: the sum
    over experts of the smaller of the two languages' shares. It is 1 if they use experts alike.

    Attributes:
      within: mean over pairs of one family; None if there is no pair.
      between: mean over pairs of different families; None if there is no pair.
      families: family -> family -> mean over the pairs of languages of the two.
    """

    within: float | None
    between: float | None
    families: dict[str, dict[str, float]]

    @classmethod
    def of(cls, shares: Mapping[str, np.ndarray]) -> FamilyOverlap:
        """Returns the overlaps of languages.

        Args:
          shares: language -> [E], the share of its choices that each expert got.
        """
        pairs = collections.defaultdict(list)
        for one, other in itertools.combinations(sorted(shares), 2):
            names = tuple(sorted((family(one), family(other))))
            pairs[names].append(float(np.minimum(shares[one], shares[other]).sum()))
        families = collections.defaultdict(dict)
        for (one, other), found in sorted(pairs.items()):
            families[one][other] = families[other][one] = float(np.mean(found))
        within, between = [], []
        for (one, other), found in pairs.items():
            (within if one == other else between).extend(found)
        return cls(_mean(within), _mean(between), dict(families))


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
