"""DistanceBuckets: the buckets of distances that share a learned bias of the logits."""

from __future__ import annotations

import math

import msgspec
import numpy as np


class DistanceBuckets(msgspec.Struct, frozen=True):
    """Assigns distances to buckets. Raffel et al. 2019, arXiv 1910.10683, section 2.1.

    A distance is the position of a key minus the position of a query. Half of the buckets hold a
    single distance each. The others hold ranges that grow by a constant factor, and the last one
    also holds all distances from `max_distance` on. Without causality, half of the buckets are for
    keys before the query, and half for keys after it.

    Attributes:
      count: number of buckets.
      max_distance: all distances from this one on share the last bucket.
      is_causal: whether queries attend only to earlier keys.
    """

    count: int
    max_distance: int
    is_causal: bool

    @property
    def side(self) -> int:
        """Number of buckets for keys on one side of the query."""
        return self.count if self.is_causal else self.count // 2

    @property
    def exact(self) -> int:
        """Number of buckets on one side that hold a single distance."""
        return self.side // 2

    def by_distance(self) -> np.ndarray:
        """Returns int32 [max_distance + 1]: the bucket of each distance to earlier keys."""
        distances = np.arange(self.max_distance + 1)
        # In float64: float32 rounds some logarithms that are integers to the wrong side.
        ratio = np.log(np.maximum(distances, self.exact) / self.exact)
        ratio /= math.log(self.max_distance / self.exact)
        ranges = self.exact + np.floor(ratio * (self.side - self.exact) + 1e-9)
        ranges = np.minimum(ranges, self.side - 1)
        return np.where(distances < self.exact, distances, ranges).astype(np.int32)

    def of(self, distances: np.ndarray) -> np.ndarray:
        """Returns the int32 bucket of each distance, in the shape of `distances`."""
        absolute = np.maximum(-distances, 0) if self.is_causal else np.abs(distances)
        buckets = self.by_distance()[np.minimum(absolute, self.max_distance)]
        return buckets if self.is_causal else buckets + np.where(distances > 0, self.side, 0)
